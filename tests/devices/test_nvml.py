import os
import subprocess
import sys

import pytest
from recorded_nvml import RecordedNvml

from kerasmem.devices.machine import host_memory, list_devices, match_card, read_machine, visible_devices
from kerasmem.devices.nvml import DriverMemory, Nvml

MIB = 2**20


def opened(name):
    nvml, reason = Nvml.open(RecordedNvml(name))
    assert reason is None
    return nvml


def test_a_card_is_described_and_its_memory_read():
    nvml = opened("t4")
    (card,) = nvml.devices
    assert (card.name, card.compute_capability, card.mig) == ("Tesla T4", (7, 5), False)
    assert card.uuid.startswith("GPU-5f6e") and card.pci_bus_id == "00000000:00:04.0"
    assert nvml.driver_version == "550.54.15"
    assert nvml.memory(card) == (DriverMemory(16106127360, 3 * MIB, 15357 * MIB), None)
    assert nvml.memory(card)[0].used_bytes == 419 * MIB


def test_processes_are_listed_and_an_untold_share_is_unknown():
    nvml = opened("t4")
    assert nvml.processes(nvml.devices[0]) == [(99, None), (4242, 1440 * MIB)]


@pytest.mark.parametrize(("name", "words"), [("no_driver", "libnvidia-ml"), ("mismatch", "reboot")])
def test_no_driver_gives_a_reason(name, words):
    api = RecordedNvml(name)
    nvml, reason = Nvml.open(api)
    assert nvml is None and words in reason and api.initialised == 0


def test_mig_instances_are_devices_and_the_parent_may_not_be_read():
    nvml = opened("a100_mig")
    parent, large, small = nvml.devices
    assert parent.mig and not large.mig and not small.mig
    assert large.parent_uuid == small.parent_uuid == parent.uuid
    assert small.name.endswith("MIG 1g.10gb") and small.compute_capability == (8, 0)
    assert nvml.memory(small)[0].total_bytes == 9728 * MIB
    memory, why_not = nvml.memory(parent)
    assert memory is None and "no permission" in why_not and "instances" in why_not
    assert nvml.processes(parent) == []


def test_shared_memory_is_unknown_with_a_reason():
    nvml = opened("shared")
    memory, why_not = nvml.memory(nvml.devices[0])
    assert memory is None and "share" in why_not


@pytest.mark.parametrize("total", [0, 2**64 - 1, "N/A", None])
def test_a_count_that_is_not_available_is_unknown(total):
    api = RecordedNvml("a100")
    api.data["devices"][0]["memory"] = {"total": total, "used": 0, "free": 0}
    nvml, _ = Nvml.open(api)
    assert nvml.memory(nvml.devices[0])[0] is None


def test_a_card_lost_while_reading_and_one_lost_before():
    nvml = opened("two_t4")
    second = nvml.devices[1]
    assert nvml.memory(second)[0] and nvml.memory(second)[0]
    memory, why_not = nvml.memory(second)
    assert memory is None and "lost" in why_not
    nvml = opened("lost_at_start")
    assert [card.index for card in nvml.devices] == [1]
    assert "GPU 0" in nvml.notes[0] and "lost" in nvml.notes[0]


def test_closing_shuts_nvml_down_once():
    api = RecordedNvml("t4")
    nvml, _ = Nvml.open(api)
    assert api.initialised == 1
    nvml.close()
    nvml.close()
    assert api.initialised == 0
    assert nvml.memory(nvml.devices[0])[1].startswith("this connection")


def test_a_forked_child_does_not_use_the_connection():
    api = RecordedNvml("t4")
    nvml, _ = Nvml.open(api)
    nvml._pid = os.getpid() + 1
    assert nvml.memory(nvml.devices[0])[0] is None
    nvml.close()
    assert api.initialised == 1


def test_importing_initialises_nothing():
    code = (
        "import sys, kerasmem.devices.machine as live, kerasmem.devices.nvml\n"
        "assert not {'pynvml', 'psutil', 'tensorflow', 'keras'} & set(sys.modules)\n"
        "live.read_machine()\n"
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --------------------------------------------------------- CUDA's numbers


def test_all_cards_in_bus_order_by_default():
    assert [device.index for device in visible_devices(opened("two_t4").devices[::-1], {})] == [0, 1]


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        ("1", [1]),
        ("1,0", [1, 0]),
        (" 1 , 0 ", [1, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("7", []),
        ("\N{SUPERSCRIPT TWO}", []),
        ("NoDevFiles", []),
        ("GPU-5f6e1c2a-77aa-4d0b-9b1e-000000000002", [1]),
        ("GPU-5f6e", []),  # fits both
        ("GPU-nothing", []),
    ],
)
def test_cuda_visible_devices(variable, indices):
    found = visible_devices(opened("two_t4").devices, {"CUDA_VISIBLE_DEVICES": variable})
    assert [device.index for device in found] == indices


def test_a_name_settles_which_card_it_is():
    cards = opened("mixed").devices
    for ordinal, name in ((0, "Tesla V100-SXM2-16GB"), (1, "Tesla T4"), (0, "Tesla T4")):
        assert match_card(cards, {}, ordinal, name).name == name
    assert match_card(cards, {}, 0, "NVIDIA L4") is None
    assert match_card(opened("t4").devices, {}, 3) is None
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in read_machine(api=RecordedNvml("mixed"), environ={}).notes[0]
    assert not read_machine(api=RecordedNvml("mixed"), environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).notes


def test_mig_instances_take_the_place_of_the_divided_card():
    cards = opened("a100_mig").devices
    (first,) = visible_devices(cards, {})
    assert first.name.endswith("3g.40gb")
    wanted = {"CUDA_VISIBLE_DEVICES": "MIG-7d5a1b52-0002-5c1e-8f6a-000000000001"}
    (chosen,) = visible_devices(cards, wanted)
    assert chosen.name.endswith("1g.10gb")
    assert match_card(cards, wanted, 0, "NVIDIA A100-SXM4-80GB MIG 1g.10gb") is chosen


# ------------------------------------------------------------------- live


def test_live_devices_of_a_divided_card():
    devices = list_devices(api=RecordedNvml("a100_mig"), environ={})
    assert [device.kind for device in devices] == ["mig parent", "mig", "mig"]
    assert devices[0].total_bytes is None and "no permission" in devices[0].notes[0]
    assert devices[1].cuda_index == 0 and devices[2].cuda_index is None
    assert devices[2].to_dict()["total_bytes"] == 9728 * MIB


def test_live_machine_shuts_the_driver_down_and_is_plain_data():
    api = RecordedNvml("t4")
    machine = read_machine(api=api, environ={})
    assert api.initialised == 0
    data = machine.to_dict()
    assert data["devices"][0]["compute_capability"] == "7.5" and data["devices"][0]["cuda_index"] == 0
    assert data["reason"] is None and data["host"]["total_bytes"] > 0


def test_live_machine_without_a_driver_says_why():
    machine = read_machine(api=RecordedNvml("no_driver"), environ={})
    assert machine.devices == () and "no NVIDIA driver" in machine.reason
    assert list_devices(api=RecordedNvml("no_driver")) == []
    assert host_memory().total_bytes == machine.host.total_bytes
