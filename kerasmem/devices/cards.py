"""The rows of the catalogue: one `Card` a row, each with the places where its two figures were read.

How a memory figure was chosen, for every row alike:

1. A figure counts when a public log, thread or file ties it to the named card. Totals from Windows do not
   count: there PyTorch's still hold what the driver keeps, and TensorFlow's GPU build is Linux only.
2. Of the figures that count, the smallest stands. A card that is judged to hold a model must hold it with
   the driver and the ECC state that leave least, so an error falls on the safe side. What else is reported
   is in the note.
3. In practice that is nearly always the *CUDA total*: `cudaDeviceProp.totalGlobalMem`, the total that
   `cudaMemGetInfo` and PyTorch report, and `device_memory_size` in XLA's target configurations. TensorFlow
   counts its free memory down from the same number. nvidia-smi and NVML print a larger one since driver
   R510, because they count what driver and firmware keep for themselves
   (https://github.com/unslothai/unsloth/pull/9362); before R510 the two nearly agree.
4. Where nothing of the kind was found the row has the nominal capacity and `memory_basis="datasheet"`.
   Its GB are powers of 1000, as in `kerasmem.units`. That is on the safe side: the drivers' totals of the
   GeForce rows are 3 to 6 % more than their names read so.

Totals given in GiB with two decimals, or in whole MiB, are taken as they stand, so they are exact to
5 MiB and 1 MiB. A note begins with the kind of figure: "CUDA total", "nvidia-smi total", "Driver total"
or "Nominal".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kerasmem.units import MIB

_GB = 10**9

_CUDA_GPUS = "https://developer.nvidia.com/cuda-gpus"
_CUDA_LEGACY_GPUS = "https://developer.nvidia.com/cuda-legacy-gpus"
# Copies of NVIDIA's table from the years when it still had Kepler, and the part of it with Turing desktops.
_CUDA_GPUS_2022 = "https://www.cnblogs.com/nightnine/p/16591404.html"
_CUDA_GPUS_DESKTOP = "https://gist.github.com/zachnicoll/f404a070611ccffda607bc65e4636d8f"
_CUDA_GPUS_QIITA = "https://qiita.com/araroux/items/e07e817cdf020bbd84a1"
_XLA = "https://github.com/openxla/xla/blob/{}/xla/backends/gpu/target_config/specs/{}.txtpb"
_XLA_OLD = "4336d12e0706168f6a382ddb231f3a83853b0657"
_XLA_H100_SXM = "0774019d97e77dc433ce97604295f6fc0f5b3b65"
_XLA_B200 = "300ec95ab85fa9f40af388054f7d43707407cb52"
_MODAL = "https://github.com/modal-labs/modal-client/pull/2797"


@dataclass(frozen=True)
class Card:
    """One GPU card as the catalogue knows it.

    Args:
        key: the short name to write on a command line, such as "a100-40".
        name: the name for people, with the nominal size.
        aliases: other names, among them those that NVML reports.
        memory_bytes: total memory in bytes, chosen as the module's docstring tells.
        compute_capability: (major, minor).
        memory_source: the address where the memory figure was read.
        memory_basis: "driver" for a total that the driver reported, "datasheet" for the nominal capacity.
        capability_source: the address where the compute capability was read.
        note: what kind of figure it is and which others are reported.

    Example:
        >>> from kerasmem.devices.catalogue import find_card
        >>> find_card("t4").compute_capability
        (7, 5)
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    memory_bytes: int
    compute_capability: tuple[int, int]
    memory_source: str
    memory_basis: Literal["driver", "datasheet"]
    capability_source: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON values: sizes in bytes, the compute capability as "8.6".

        Returns:
            A new dictionary with one entry a field.

        Example:
            >>> from kerasmem.devices.catalogue import find_card
            >>> find_card("t4").to_dict()["compute_capability"]
            '7.5'
        """
        return {
            "key": self.key,
            "name": self.name,
            "aliases": list(self.aliases),
            "memory_bytes": self.memory_bytes,
            "compute_capability": "{}.{}".format(*self.compute_capability),
            "memory_source": self.memory_source,
            "memory_basis": self.memory_basis,
            "capability_source": self.capability_source,
            "note": self.note,
        }


def _gib(hundredths: int) -> int:
    """Return the bytes of a total that was printed in GiB with two decimals, given in hundredths."""
    return hundredths * 2**30 // 100


def _driver(
    key: str,
    name: str,
    aliases: str,
    memory: int,
    cc: tuple[int, int],
    source: str,
    cc_source: str,
    note: str,
) -> Card:
    """Return a row whose memory the driver reported; `aliases` are separated by commas."""
    return Card(key, name, _split(aliases), memory, cc, source, "driver", cc_source, note)


def _nominal(
    key: str,
    name: str,
    aliases: str,
    memory: int,
    cc: tuple[int, int],
    source: str,
    cc_source: str,
    note: str = "",
) -> Card:
    """Return a row with the nominal capacity; `aliases` are separated by commas."""
    text = "Nominal capacity, GB as powers of 1000: no total reported by a Linux driver was found."
    return Card(key, name, _split(aliases), memory, cc, source, "datasheet", cc_source, f"{text} {note}".rstrip())


def _split(aliases: str) -> tuple[str, ...]:
    return tuple(alias.strip() for alias in aliases.split(","))


CARDS: tuple[Card, ...] = (
    # Kepler
    _driver(
        "k20", "Tesla K20 5GB", "K20 5GB, Tesla K20c, Tesla K20m",
        4799 * MIB, (3, 5), "https://github.com/tensorflow/tensorflow/issues/5122", _CUDA_GPUS_2022,
        "nvidia-smi total with ECC on, driver 352.39.",
    ),
    _driver(
        "k80", "Tesla K80 12GB (one of its two GPUs)", "K80 12GB",
        11441 * MIB, (3, 7), "https://github.com/rcgsheffield/sheffield_hpc/pull/1030", _CUDA_GPUS_2022,
        "nvidia-smi total of one GPU with ECC on, drivers 396 and 410; the board has two, and "
        "CUDA sees two devices.",
    ),
    # Pascal
    _nominal(
        "p100-12", "Tesla P100 PCIe 12GB", "P100 12GB, Tesla P100-PCIE-12GB",
        12 * _GB, (6, 0), "https://manualmachine.com/pny/tcsp100m16gbpb/8129252-user-manual",
        _CUDA_LEGACY_GPUS,
        "Its ECC takes no memory.",
    ),
    _driver(
        "p100-16", "Tesla P100 16GB", "P100 16GB, Tesla P100-PCIE-16GB, Tesla P100-SXM2-16GB",
        17_066_885_120, (6, 0), _XLA.format(_XLA_OLD, "p100"), _CUDA_LEGACY_GPUS,
        "CUDA total of the SXM2 card (16276 MiB), ECC on; its ECC takes no memory. nvidia-smi 390.46 showed "
        "16280 MiB on the PCIe card, and newer drivers 16384 MiB.",
    ),
    _driver(
        "gtx1080ti", "GeForce GTX 1080 Ti 11GB", "1080 Ti, GTX 1080 Ti 11GB, NVIDIA GeForce GTX 1080 Ti",
        11_715_084_288, (6, 1), "https://github.com/ethereum-mining/ethminer/issues/536", _CUDA_LEGACY_GPUS,
        "CUDA total from deviceQuery (11172 MiB).",
    ),
    # Volta and Turing
    _driver(
        "v100-16", "Tesla V100 16GB",
        "V100 16GB, Tesla V100-SXM2-16GB, Tesla V100-PCIE-16GB",
        16_935_682_048, (7, 0), _XLA.format(_XLA_OLD, "v100"), _CUDA_LEGACY_GPUS,
        "CUDA total of the SXM2 card (16151 MiB), ECC on. nvidia-smi showed 16160 MiB with driver 440.64 and "
        "16384 MiB with 535.54.",
    ),
    _driver(
        "v100-32", "Tesla V100 32GB",
        "V100 32GB, Tesla V100-SXM2-32GB, Tesla V100-PCIE-32GB, Tesla V100S-PCIE-32GB",
        32480 * MIB, (7, 0), "https://github.com/godweiyang/GrabGPU/issues/5", _CUDA_LEGACY_GPUS,
        "nvidia-smi total with ECC on, driver 418.116. PyTorch reports 31.74 GiB, nvidia-smi on newer "
        "drivers 32768 MiB.",
    ),
    _nominal(
        "titanv", "NVIDIA TITAN V 12GB", "TITAN V 12GB",
        12 * _GB, (7, 0), "https://github.com/huggingface/huggingface.js/pull/2151", _CUDA_LEGACY_GPUS,
    ),
    _driver(
        "t4", "Tesla T4 16GB", "NVIDIA T4, T4 16GB",
        15_843_721_216, (7, 5),
        "https://chiemon.github.io/2024/12/25/%E6%98%BE%E5%8D%A1%E4%BF%A1%E6%81%AF.html", _CUDA_GPUS_2022,
        "CUDA total from deviceQuery (15110 MiB), driver for CUDA 11.0. nvidia-smi shows 15360 MiB on newer "
        "drivers. TensorFlow has also logged 15.75 GiB, as with ECC off.",
    ),
    _driver(
        "rtx2080ti", "GeForce RTX 2080 Ti 11GB", "2080 Ti, RTX 2080 Ti 11GB, NVIDIA GeForce RTX 2080 Ti",
        _gib(1076), (7, 5), "https://github.com/JDAI-CV/image-captioning/issues/11", _CUDA_GPUS_DESKTOP,
        "CUDA total (PyTorch: 10.76 GiB).",
    ),
    # Ampere
    _driver(
        "a100-40", "NVIDIA A100 40GB", "A100 40GB, NVIDIA A100-SXM4-40GB, NVIDIA A100-PCIE-40GB",
        42_298_834_944, (8, 0), "https://github.com/bottlerocket-os/bottlerocket/pull/3873", _CUDA_GPUS_2022,
        "CUDA total of the SXM4 card from deviceQuery (40339 MiB), ECC on. nvidia-smi shows 40960 MiB; XLA's "
        "target file says 42331013120 bytes.",
    ),
    _driver(
        "a100-80", "NVIDIA A100 80GB", "A100 80GB, NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe",
        _gib(7914), (8, 0), "https://github.com/lianqi1008/Control-GIC/issues/6", _CUDA_GPUS_2022,
        "CUDA total (PyTorch: 79.14 GiB). Others report 79.25 GiB, XLA's target file for the SXM4 card "
        "85100068864 bytes (79.26 GiB), nvidia-smi 81920 MiB.",
    ),
    _driver(
        "a30", "NVIDIA A30 24GB", "A30 24GB",
        _gib(2353), (8, 0), "https://github.com/google/RB-Modulation/issues/5", _CUDA_GPUS_2022,
        "CUDA total (PyTorch: 23.53 GiB).",
    ),
    _driver(
        "a10", "NVIDIA A10 24GB", "A10 24GB",
        23028 * MIB, (8, 6), _MODAL, _CUDA_GPUS,
        "nvidia-smi total; no CUDA total was found, which is smaller by a few hundred MiB (see a10g).",
    ),
    _driver(
        "a10g", "NVIDIA A10G 24GB", "A10G 24GB",
        _gib(2200), (8, 6), "https://github.com/batteries-included/batteries-included/pull/1663",
        "https://github.com/vantage-sh/ec2instances.info/issues/724",
        "CUDA total as Ollama logs it, 22.0 GiB to one decimal (so within 50 MiB).",
    ),
    _driver(
        "rtxa6000", "NVIDIA RTX A6000 48GB", "A6000, A6000 48GB, NVIDIA RTX A6000",
        51_041_271_808, (8, 6), _XLA.format(_XLA_OLD, "a6000"), _CUDA_GPUS,
        "CUDA total (48677 MiB); the source does not give the ECC state, and ECC takes several per cent "
        "(compare rtx6000ada).",
    ),
    _driver(
        "rtx3060", "GeForce RTX 3060 12GB", "3060, 3060 12GB, RTX 3060 12GB, NVIDIA GeForce RTX 3060",
        _gib(1175), (8, 6), "https://github.com/smy20011/dreambooth-gui/issues/78", _CUDA_GPUS_QIITA,
        "CUDA total (PyTorch: 11.75 GiB); nvidia-smi shows 12288 MiB. An 8 GB version was sold too: for that "
        "one, give the size.",
    ),
    _driver(
        "rtx3070", "GeForce RTX 3070 8GB", "3070, RTX 3070 8GB, NVIDIA GeForce RTX 3070",
        _gib(776), (8, 6), "https://github.com/sshan-zhao/GASDA/issues/19", _CUDA_GPUS,
        "CUDA total (PyTorch: 7.76 GiB; others 7.78); nvidia-smi shows 8192 MiB.",
    ),
    _driver(
        "rtx3080", "GeForce RTX 3080 10GB", "3080, 3080 10GB, RTX 3080 10GB, NVIDIA GeForce RTX 3080",
        _gib(978), (8, 6), "https://github.com/zai-org/CogVideo/issues/34", _CUDA_GPUS_QIITA,
        "CUDA total (PyTorch: 9.78 GiB). A 12 GB version was sold too: for that one, give the size.",
    ),
    _driver(
        "rtx3090", "GeForce RTX 3090 24GB", "3090, RTX 3090 24GB, NVIDIA GeForce RTX 3090",
        _gib(2368), (8, 6), "https://github.com/3DTopia/OpenLRM/issues/42", _CUDA_GPUS,
        "CUDA total (PyTorch: 23.68 GiB; others 23.70); nvidia-smi shows 24576 MiB.",
    ),
    # Ada
    _driver(
        "l4", "NVIDIA L4 24GB", "L4 24GB",
        23034 * MIB, (8, 9), _MODAL, _CUDA_GPUS,
        "nvidia-smi total with ECC on; no CUDA total was found, which is smaller by a few hundred MiB.",
    ),
    _driver(
        "l40", "NVIDIA L40 48GB", "L40 48GB",
        _gib(4440), (8, 9), "https://github.com/QwenLM/Qwen3-VL/issues/2097", _CUDA_GPUS,
        "CUDA total (PyTorch: 44.40 GiB).",
    ),
    _driver(
        "l40s", "NVIDIA L40S 48GB", "L40S 48GB",
        _gib(4442), (8, 9), "https://github.com/stepfun-ai/Step-Video-T2V/issues/8", _CUDA_GPUS,
        "CUDA total (PyTorch: 44.42 GiB); nvidia-smi shows 46068 MiB.",
    ),
    _driver(
        "rtx6000ada", "NVIDIA RTX 6000 Ada 48GB",
        "6000 Ada, RTX 6000 Ada 48GB, NVIDIA RTX 6000 Ada Generation",
        _gib(4443), (8, 9), "https://github.com/DINGYANB/MTVCrafter/issues/21", _CUDA_GPUS,
        "CUDA total (PyTorch: 44.43 GiB) where nvidia-smi shows 46068 MiB, as with ECC on; with ECC off the "
        "card has more.",
    ),
    _nominal(
        "rtx4060ti-8", "GeForce RTX 4060 Ti 8GB", "4060 Ti 8GB, RTX 4060 Ti 8GB",
        8 * _GB, (8, 9), "https://cputronic.com/gpu/nvidia-geforce-rtx-4060-ti-8-gb", _CUDA_GPUS,
    ),
    _nominal(
        "rtx4060ti-16", "GeForce RTX 4060 Ti 16GB", "4060 Ti 16GB, RTX 4060 Ti 16GB",
        16 * _GB, (8, 9), "https://cputronic.com/gpu/nvidia-geforce-rtx-4060-ti-16-gb", _CUDA_GPUS,
    ),
    _nominal(
        "rtx4070", "GeForce RTX 4070 12GB", "4070, RTX 4070 12GB, NVIDIA GeForce RTX 4070",
        12 * _GB, (8, 9), "https://huggingface.co/hardware/rtx-4070", _CUDA_GPUS,
    ),
    _nominal(
        "rtx4080", "GeForce RTX 4080 16GB", "4080, RTX 4080 16GB, NVIDIA GeForce RTX 4080",
        16 * _GB, (8, 9), "https://huggingface.co/hardware/rtx-4080", _CUDA_GPUS,
    ),
    _driver(
        "rtx4090", "GeForce RTX 4090 24GB", "4090, RTX 4090 24GB, NVIDIA GeForce RTX 4090",
        _gib(2349), (8, 9), "https://github.com/Sautenich/UAV-VLA/issues/7", _CUDA_GPUS,
        "CUDA total (PyTorch: 23.49 GiB), driver 575.64. Others report 23.52 to 23.65 GiB, nvidia-smi "
        "24564 MiB.",
    ),
    # Hopper
    _driver(
        "h100-pcie", "NVIDIA H100 PCIe 80GB", "H100 PCIe 80GB, NVIDIA H100 PCIe",
        84_942_979_072, (9, 0), _XLA.format(_XLA_OLD, "h100_pcie"), _CUDA_GPUS,
        "CUDA total (81008 MiB).",
    ),
    _driver(
        "h100-sxm", "NVIDIA H100 SXM 80GB", "H100 80, H100 80GB, H100 SXM 80GB, NVIDIA H100 80GB HBM3",
        84_942_979_072, (9, 0), _XLA.format(_XLA_H100_SXM, "h100_sxm"), _CUDA_GPUS,
        "CUDA total (81008 MiB), ECC on; nvidia-smi shows 81559 MiB. The PCIe card has the same memory, so "
        "h100-80 means this row.",
    ),
    _driver(
        "h100-nvl", "NVIDIA H100 NVL 94GB", "H100 94, H100 94GB, H100 NVL 94GB, NVIDIA H100 NVL",
        99_961_274_368, (9, 0), "https://github.com/fastfetch-cli/fastfetch/issues/1658", _CUDA_GPUS,
        "Driver total of one card of a pair as fastfetch reads it (95330 MiB), driver 570.86: below what "
        "nvidia-smi counts, so taken as a CUDA total.",
    ),
    _nominal(
        "h200", "NVIDIA H200 141GB", "H200 141GB, H200 SXM, NVIDIA H200 141GB HBM3e",
        141 * _GB, (9, 0),
        "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json",
        _CUDA_GPUS,
        "XLA's target file has 141 GiB to the byte, which is the name, not a reading.",
    ),
    # Blackwell
    _driver(
        "b200", "NVIDIA B200 180GB", "B200 180GB",
        191_514_411_008, (10, 0), _XLA.format(_XLA_B200, "b200"), _CUDA_GPUS,
        "CUDA total (182642 MiB), ECC on.",
    ),
    _driver(
        "rtx5070", "GeForce RTX 5070 12GB", "5070, RTX 5070 12GB, NVIDIA GeForce RTX 5070",
        (12227 - 464) * MIB, (12, 0), "https://github.com/shkhln/libc6-shim/issues/14", _CUDA_GPUS,
        "CUDA total, computed: nvidia-smi -q shows 12227 MiB of which 464 MiB are reserved by the driver.",
    ),
    _nominal(
        "rtx5070ti", "GeForce RTX 5070 Ti 16GB", "5070 Ti, RTX 5070 Ti 16GB, NVIDIA GeForce RTX 5070 Ti",
        16 * _GB, (12, 0), "https://github.com/huggingface/huggingface.js/pull/1327", _CUDA_GPUS,
    ),
    _driver(
        "rtx5080", "GeForce RTX 5080 16GB", "5080, RTX 5080 16GB, NVIDIA GeForce RTX 5080",
        _gib(1548), (12, 0), "https://github.com/vllm-project/vllm/issues/14452", _CUDA_GPUS,
        "CUDA total (PyTorch: 15.48 GiB).",
    ),
    _driver(
        "rtx5090", "GeForce RTX 5090 32GB", "5090, RTX 5090 32GB, NVIDIA GeForce RTX 5090",
        33_677_180_928, (12, 0), "https://github.com/aikitoria/open-gpu-kernel-modules/issues/1", _CUDA_GPUS,
        "CUDA total from deviceQuery (32117 MiB), driver 570.133; nvidia-smi shows 32607 MiB.",
    ),
)  # fmt: skip
"""Every card of the catalogue, oldest architecture first."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "p100": ("p100-12", "p100-16"),
    "v100": ("v100-16", "v100-32"),
    "a100": ("a100-40", "a100-80"),
    "h100": ("h100-pcie", "h100-sxm", "h100-nvl"),
    "4060ti": ("rtx4060ti-8", "rtx4060ti-16"),
    "rtx4060ti": ("rtx4060ti-8", "rtx4060ti-16"),
}
"""Names that stand for several cards, and the keys of those cards."""
