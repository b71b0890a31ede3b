# ruff: noqa: E501 - each text stands on one line, as in a log
"""Texts in the documented formats, with figures and names of our own, and what has to be read from them."""

from __future__ import annotations

M, G = 2**20, 2**30
GPU0 = "/job:localhost/replica:0/task:0/device:GPU:0"
TIME = "2025-03-04 05:06:07.891011: "


def bfc_dump(name, limit, used, free=(), pool=None, old=False, requested=""):
    """A dump of the allocator, in bytes as TensorFlow wrote it for years, or with units as it does now."""
    source = (
        "I tensorflow/core/common_runtime/bfc_allocator.cc:{}] "
        if old
        else "I0000 00:00:1700000000.1   77 bfc_allocator.cc:{}] "
    )

    def show(count):
        return str(count) if old else f"{count / M:.2f}MiB"

    lines = [f"{source.format(900)}BFCAllocator dump for {name}"]
    lines += [
        f"{source.format(901)}Bin ({256 << b}): \tTotal Chunks: 0, Chunks in use: 0. 0B allocated for chunks."
        for b in range(21)
    ]
    lines += [f"{source.format(902)}InUse at 7f00{n:08x} of size 4096 next {n}" for n in range(200)]
    lines += [f"{source.format(903)}Free  at 7f11{n:08x} of size {count} next {n}" for n, count in enumerate(free)]
    lines += [f"{source.format(904)}Sum Total of in-use chunks: {used / M:.2f}MiB"]
    if pool is not None:
        word = "total_region_allocated_bytes_" if old else "Total size in pool"
        lines += [f"{source.format(905)}{word}: {show(pool)} memory_limit_: {show(limit)} available bytes: 0"]
    lines += [f"{source.format(906)}Stats: "]
    for key, value in (("Limit", show(limit)), ("InUse", show(used)), ("MaxInUse", show(used)), ("NumAllocs", "321")):
        lines.append(f"{key + ':':<16}{value:>20}")
    return "\n".join(lines)


def tensor(shape, kind="float", where=GPU0, by="GPU_0_bfc", node=None, word="OOM when allocating tensor with"):
    text = f"{word} shape[{','.join(map(str, shape))}] and type {kind} on {where} by allocator {by}"
    return text + (f"\n\t [[{{{{node {node}}}}}]]" if node else "")


def warned(size, rounded=None, op=None, name="GPU_0_bfc"):
    tail = (f" (rounded to {rounded})" if rounded else "") + (f"requested by op {op}" if op else "")
    return f"{TIME}W tensorflow/core/common_runtime/bfc_allocator.cc:479] Allocator ({name}) ran out of memory trying to allocate {size}{tail}"


def kernel(process, pid, rss, group=False):
    start = "Memory cgroup out of memory" if group else "Out of memory"
    return f"[12345.678901] {start}: Killed process {pid} ({process}) total-vm:{rss * 3}kB, anon-rss:{rss}kB, file-rss:128kB, shmem-rss:0kB, UID:1000 pgtables:900kB oom_score_adj:0"


def torch_new(asked, card, total, free, used, spare, extra="", platform="CUDA", word="capacity"):
    return (
        f"{platform} out of memory. Tried to allocate {asked}. GPU {card} has a total {word} of {total} of which {free} is free."
        f"{extra} Of the allocated memory {used} is allocated by PyTorch, and {spare} is reserved by PyTorch but unallocated."
        " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )


def torch_old(asked, card, total, used, free, kept, word="reserved in total by PyTorch"):
    return f"CUDA out of memory. Tried to allocate {asked} (GPU {card}; {total} total capacity; {used} already allocated; {free} free; {kept} {word})"


GRAPH = f"""  File "/env/lib/python3.11/site-packages/keras/src/backend/tensorflow/trainer.py", line 377, in fit
tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:

Detected at node gradient_tape/unet_1/up_3_1/convolution/Conv2DBackpropInput defined at (most recent call last):
  File "/home/ada/train.py", line 88, in <module>

{tensor((12, 320, 320, 48))}
\t [[{{{{node gradient_tape/unet_1/up_3_1/convolution/Conv2DBackpropInput}}}}]]
Hint: If you want to see a list of allocated tensors when OOM happens, add report_tensor_allocations_upon_oom to RunOptions.
 [Op:__inference_multi_step_on_iterator_4711]"""
PEAK = """BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:    1.25GiB
              constant allocation:         0B
        maybe_live_out allocation:    1.25GiB
     preallocated temp allocation:    9.50GiB
                 total allocation:   12.00GiB
Peak buffers:
\tBuffer 1:
\t\tSize: 3.00GiB
\t\tOperator: op_name="{op}" source_file="/home/ada/net.py" source_line=12
\t\tXLA Label: fusion
\t\tShape: f32[96,128,256,256]
\t\t==========================
"""

WRAPPED = "ResourceExhaustedError: {{function_node __wrapped__%s_device_" + GPU0 + "}} %s [Op:%s]"
IN_INITIALIZER = (
    '  File "/env/lib/python3.11/site-packages/keras/src/initializers/constant_initializers.py", line 112, in __call__'
)
IN_OPTIMIZER = (
    '  File "/env/lib/python3.11/site-packages/keras/src/optimizers/base_optimizer.py", line 300, in add_variable'
)
IN_PREDICT = '  File "/env/lib/python3.11/site-packages/keras/src/backend/tensorflow/trainer.py", line 566, in predict'
FIT = '  File "/home/ada/train.py", line 31, in <module>\n    model.fit(x, y, epochs=3, batch_size=32)'


def eager(op, shape):
    return WRAPPED % (op, tensor(shape), op)


# name, text, what has to be found: fields of the JSON; "layer" and so on default to "not checked"
POSITIVE = [
    (
        "copy between devices of a worker",
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: SameWorkerRecvDone unable to allocate output tensor. Key: /job:worker/replica:0/task:0/device:CPU:0;1f2e3d4c;/job:worker/replica:0/task:0/device:GPU:2;edge_7_input;0:0",
        {"family": "tensorflow", "device": "GPU:2"},
    ),
    ("words that nobody knows", "tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node train_step}} new words [Op:MatMul]", {"family": "tensorflow"}),
    # TensorFlow
    ("tf op", tensor((48, 96, 96, 80), node="encoder_1/stage2_1/Relu"), {"family": "tensorflow", "tensor_shape": [48, 96, 96, 80], "requested_bytes": 48 * 96 * 96 * 80 * 4, "device": "GPU:0", "layer": "stage2", "pass": "forward"}),
    ("tf graph error", GRAPH, {"family": "tensorflow", "layer": "up_3", "pass": "backward", "requested_bytes": 12 * 320 * 320 * 48 * 4}),
    ("tf half", tensor((8, 1000), "half"), {"requested_bytes": 16000, "dtype": "half"}),
    ("tf double", tensor((64, 2048, 7, 7), "double", node="features/conv5/Conv2D"), {"requested_bytes": 64 * 2048 * 49 * 8, "first": "float32"}),
    ("tf second card", tensor((2, 3), where=GPU0.replace("GPU:0", "GPU:3"), by="GPU_3_bfc"), {"device": "GPU:3"}),
    ("tf cpu", tensor((9000, 9000), where=GPU0.replace("GPU", "CPU"), by="cpu"), {"device": "CPU:0"}),
    ("tf mklcpu", tensor((512, 5, 5, 640), where=GPU0.replace("GPU", "CPU"), by="mklcpu"), {"device": "CPU:0", "family": "tensorflow"}),
    ("tf 1 session", 'ResourceExhaustedError (see above for traceback): OOM when allocating tensor with shape[70000,3072]\n\t [[Node: training/Adam/mul_9 = Mul[T=DT_FLOAT, _device="/job:localhost/replica:0/task:0/gpu:0"](a, b)]]', {"tensor_shape": [70000, 3072], "pass": "optimizer", "layer": None}),
    ("tf 1 gradients", tensor((40, 54, 54, 256)) + "\n\t [[Node: training/SGD/gradients/block3_conv1/convolution_grad/Conv2DBackpropInput = Conv2DBackpropInput[]]]", {"layer": None, "pass": "backward"}),
    ("tf 1 of type", "OOM when allocating tensor of shape [4096,4096] and type float\n".replace("of shape", "with shape"), {"tensor_shape": [4096, 4096], "requested_bytes": 64 * M}),
    ("keras 2 layer", 'File "/env/keras/engine/training.py", line 1\n' + tensor((32, 28, 28, 512), node="model_1/conv_7/Conv2D"), {"layer": None, "pass": "forward"}),
    ("nested layer", tensor((32, 77, 768), node="clip_1/text_1/block_11_1/mlp_1/Gelu"), {"layer": "text/block_11/mlp"}),
    ("layer norm inside", tensor((32, 77, 768), node="gradient_tape/vit_1/ln_4_1/moments/Mul"), {"layer": "ln_4", "pass": "backward"}),
    ("loss", tensor((32, 50000), node="compile_loss/sparse_categorical_crossentropy/Softmax"), {"layer": None, "pass": "forward"}),
    ("optimizer", tensor((30522, 1024), node="adamw/Mul_3"), {"pass": "optimizer", "first": "optimizer"}),
    ("bfc warning", warned("2.29GiB"), {"family": "tensorflow", "requested_bytes": round(2.29 * G), "device": "GPU:0"}),
    ("bfc warning rounded", warned("712.50MiB", 747110400, "net_1/attention_5_1/MatMul"), {"requested_bytes": 747110400, "layer": "attention_5"}),
    ("bfc capacity, units", warned("256.00MiB", 256 * M, "net_1/a_1/Relu") + "\n" + bfc_dump("GPU_0_bfc", 8 * G, 8 * G - 100 * M, [60 * M, 40 * M], 8 * G), {"cause": "capacity", "limit_bytes": 8 * G, "free_bytes": 100 * M, "largest_free_bytes": 60 * M, "reserved_bytes": 8 * G}),
    ("bfc fragmented, units", warned("256.00MiB", 256 * M) + "\n" + bfc_dump("GPU_0_bfc", 8 * G, 7 * G, [128 * M] * 8, 8 * G), {"cause": "fragmentation", "free_bytes": G, "largest_free_bytes": 128 * M, "first": "CUDA"}),
    ("bfc capacity, old", warned("196.00MiB") + "\n" + bfc_dump("GPU_0_bfc", 11 * G, 11 * G - 9 * M, [9 * M], old=True) + "\n" + tensor((16, 56, 56, 1024)), {"cause": "capacity", "limit_bytes": 11 * G, "in_use_bytes": 11 * G - 9 * M, "tensor_shape": [16, 56, 56, 1024]}),
    ("bfc fragmented, old", warned("3.00GiB") + "\n" + bfc_dump("GPU_0_bfc", 11 * G, 6 * G, [2 * G, 2 * G, G], 11 * G, old=True), {"cause": "fragmentation"}),
    ("bfc other process", warned("1.00GiB", G) + "\n" + bfc_dump("GPU_0_bfc", 15 * G, 3 * G, [200 * M], 4 * G), {"cause": "other process", "first": "card"}),
    ("bfc far below the limit", warned("600.00MiB") + "\nStats: \nLimit:                 12000000000\nInUse:                  1000000000\n", {"cause": "other process", "limit_bytes": 12 * 10**9}),
    ("bfc full, stats only", warned("600.00MiB") + "\nStats: \nLimit:                 12000000000\nInUse:                 11800000000\n", {"cause": "capacity", "free_bytes": 2 * 10**8}),
    ("dst tensor", f"InternalError: Failed copying input tensor from {GPU0.replace('GPU', 'CPU')} to {GPU0} in order to run _EagerConst: Dst tensor is not initialized.", {"family": "tensorflow", "device": "GPU:0", "first": "Stream"}),
    ("dst tensor, old", "tensorflow.python.framework.errors_impl.InternalError: Dst tensor is not initialized.\n\t [[Node: zeros_77 = Const[]]]", {"family": "tensorflow"}),
    (
        "async allocator",
        TIME
        + "E tensorflow/core/common_runtime/gpu/gpu_cudamallocasync_allocator.cc:288] gpu_async_1 cuMemAllocAsync failed to allocate 3221225472 bytes: CUDA error: out of memory (CUDA_ERROR_OUT_OF_MEMORY)\n Reported by CUDA: Free memory/Total memory: 1073741824/17179869184\nStats: Limit:                15000000000\nInUse:                 14900000000\n",
        {"requested_bytes": 3 * G, "free_bytes": G, "device": "GPU:1", "limit_bytes": 15 * 10**9, "cause": "capacity"},
    ),
    ("async, others", "gpu_async_0 cuMemAllocAsync failed to allocate 3221225472 bytes: CUDA error: out of memory\n Reported by CUDA: Free memory/Total memory: 1073741824/17179869184\nInUse:                  2147483648\n", {"cause": "other process"}),
    ("driver refused", TIME + "E tensorflow/stream_executor/cuda/cuda_driver.cc:802] failed to allocate 1.95G (2097152000 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory", {"family": "tensorflow", "requested_bytes": 2097152000}),
    # of no batch
    ("weights", eager("StatelessRandomUniformV2", (2000000, 2048)), {"first": "layer smaller", "without": ["max_batch_size", "mixed"]}),
    ("weights, zeros", IN_INITIALIZER + "\n" + eager("Fill", (2000000, 2048)), {"first": "layer smaller", "without": ["max_batch_size", "mixed"]}),
    ("weights, allocator", warned("14.65GiB", 15728640000, "StatelessRandomUniformV2"), {"requested_bytes": 15728640000, "first": "14.6 GiB"}),
    ("slots", IN_OPTIMIZER + "\n" + IN_INITIALIZER + "\n" + eager("Fill", (200000, 2048)), {"first": "optimizer", "without": ["max_batch_size"]}),
    ("arrays", eager("GatherV2", (60000, 224, 224, 3)), {"first": "Stream", "without": ["max_batch_size", "kerasmem.fit"]}),
    ("arrays, copied", FIT + f"\nInternalError: Failed copying input tensor from {GPU0.replace('GPU', 'CPU')} to {GPU0} in order to run _EagerConst: Dst tensor is not initialized.", {"first": "Stream", "without": ["max_batch_size"]}),
    ("arrays, by their rows", FIT + "\n" + tensor((50000, 96, 96, 3)), {"first": "Stream", "without": ["max_batch_size"]}),
    ("embedding", tensor((512, 128, 768), node="net_1/embedding_1/GatherV2"), {"layer": "embedding", "first": "batches of"}),
    ("outputs of predict, of no shape", IN_PREDICT + "\nInternalError: {{function_node __wrapped__ConcatV2_N_63_device_" + GPU0 + "}} Dst tensor is not initialized. [Op:ConcatV2]", {"first": "Predict in a loop"}),
    ("weights, of no shape", IN_INITIALIZER + "\nResourceExhaustedError: {{function_node __wrapped__Mul_device_" + GPU0 + "}} failed to allocate memory [Op:Mul]", {"family": "tensorflow", "first": "layer smaller"}),
    ("numpy, three digits", "MemoryError: Unable to allocate 149. GiB for an array with shape (200000, 224, 224, 4) and data type float32", {"family": "host", "requested_bytes": 200000 * 224 * 224 * 16}),
    ("torch 5 wrapped", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total\ncapacity of 24.00 GiB of which 1.00 GiB is free. Of the\nallocated memory 20.00 GiB is allocated by PyTorch, and 2.00 GiB is reserved by PyTorch but unallocated.", {"limit_bytes": 24 * G, "free_bytes": G, "in_use_bytes": 20 * G}),
    ("outputs of predict", IN_PREDICT + "\n" + eager("ConcatV2", (200, 512, 512, 21)), {"first": "Predict in a loop", "without": ["max_batch_size"]}),
    ("earlier models", tensor((32, 64, 224, 224), node="functional_7_1/conv2d_31_1/convolution"), {"first": "model number 8", "code": "clear_session"}),
    ("the second model", tensor((32, 64, 224, 224), node="functional_1_1/conv2d_3_1/convolution"), {"first": "batches of 16"}),
    ("rows of a batch of sequences", FIT + "\n" + tensor((960, 64, 64, 64), node="net_1/td_1/conv2d_1/convolution"), {"first": "batches of 16 instead of 32"}),
    # XLA and JAX
    ("xla bytes", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5368709120 bytes.\n" + PEAK.format(op="gradient_tape/resnet_1/conv4_1/Conv2D"), {"family": "xla", "requested_bytes": 5 * G, "layer": "conv4", "pass": "backward", "warned": True}),
    ("xla today", warned("1.50GiB", 1610612736, name="GPU_0_bfc") + "\nOut of memory while trying to allocate 1.50GiB.\n\t [[{{node StatefulPartitionedCall}}]]", {"family": "xla", "requested_bytes": 1536 * M, "operation": None, "warned": True}),
    ("jax", "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.\n" + PEAK.format(op="jit(step)/transpose(jvp(Net))/dot_general"), {"family": "jax", "requested_bytes": 8 * G, "pass": "backward"}),
    ("jax allocating", "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 1234567890 bytes.", {"family": "jax", "requested_bytes": 1234567890}),
    ("jax autotuning", "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Failed to get configs for: 17 out of 106 instructions. See logs for all failures. Example failure: \nOut of memory while trying to allocate 2.02GiB with allocator GPU_0_bfc on device 0. [tf-allocator-allocation-error='']", {"family": "jax", "requested_bytes": round(2.02 * G), "warned": False, "first": "smaller batch", "code": "--xla_gpu_autotune_level=0"}),
    ("jax old", "RuntimeError: Resource exhausted: Failed to allocate request for 3.50GiB (3758096384B) on device ordinal 1", {"family": "jax", "requested_bytes": 3758096384, "device": "GPU:1"}),
    ("tpu hbm", "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 19.30G of 15.60G hbm. Exceeded hbm capacity by 3.70G.", {"family": "xla", "device": "TPU", "requested_bytes": round(19.3 * G), "limit_bytes": round(15.6 * G), "cause": "capacity", "warned": False}),
    ("tpu hbm, jax", "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.10G of 31.25G hbm.", {"family": "jax", "device": "TPU"}),
    ("tpu vmem", "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for %k = bf16[512,512]{1,0} custom-call()", {"family": "xla", "device": "TPU"}),
    ("tpu cores", "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 30.00G, SparseCore Hbm usage 100.00G, exceeding available bytes: 90.00G", {"family": "xla", "limit_bytes": 90 * G}),
    ("tpu buffer", "ValueError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 9.00M. That was not possible. There are 5.50M free.; (0x0x2_HBM0)", {"requested_bytes": 9 * M, "free_bytes": round(5.5 * M), "cause": "capacity"}),
    ("tpu program", "RESOURCE_EXHAUSTED: Error loading program 'jit_f': Attempting to reserve 12.25G at the bottom of memory. That was not possible. There are 300.00M free, 0B reserved", {"requested_bytes": round(12.25 * G)}),
    ("tpu allocation", "Allocation (size=34359738368) would exceed memory (size=17179869184) :: #allocation7 [shape = 'f32[512,4096,4096]{1,2,0}', space=hbm]", {"tensor_shape": [512, 4096, 4096], "limit_bytes": 16 * G}),
    # PyTorch
    ("torch 0", "RuntimeError: cuda runtime error (2) : out of memory at /build/aten/src/THC/generic/THCStorage.cu:44", {"family": "pytorch"}),
    ("torch 1", "RuntimeError: " + torch_old("900.00 MiB", 0, "10.92 GiB", "9.80 GiB", "300.12 MiB", "410.00 MiB", "cached"), {"requested_bytes": 900 * M, "in_use_bytes": round(9.8 * G), "reserved_bytes": round(9.8 * G) + 410 * M, "cause": "capacity"}),
    ("torch 2", "RuntimeError: " + torch_old("20.00 MiB", 0, "16.10 GiB", "15.02 GiB", "7.31 MiB", "15.20 GiB"), {"family": "pytorch", "limit_bytes": round(16.1 * G), "device": "GPU:0", "cause": "capacity"}),
    ("torch 3 fragmented", "torch.cuda.OutOfMemoryError: " + torch_old("1.00 GiB", 2, "23.70 GiB", "15.00 GiB", "500.00 MiB", "22.00 GiB") + " If reserved memory is >> allocated memory try setting max_split_size_mb", {"cause": "fragmentation", "device": "GPU:2", "first": "blocks"}),
    ("torch 3 others", torch_old("2.00 GiB", 0, "23.70 GiB", "3.00 GiB", "100.00 MiB", "3.50 GiB"), {"cause": "other process"}),
    ("torch 4", "torch.cuda.OutOfMemoryError: " + torch_new("372.00 MiB", 0, "14.75 GiB", "100.00 MiB", "14.00 GiB", "200.00 MiB", " Process 31 has 14.64 GiB memory in use.", word="capacty"), {"cause": "capacity", "free_bytes": 100 * M, "in_use_bytes": 14 * G}),
    ("torch 5 others", "torch.OutOfMemoryError: " + torch_new("1.50 GiB", 1, "22.06 GiB", "410.00 MiB", "13.00 GiB", "600.00 MiB", " Process 991 has 9.10 GiB memory in use. Including non-PyTorch memory, this process has 14.10 GiB memory in use."), {"cause": "other process", "device": "GPU:1"}),
    ("torch 5 fragmented", torch_new("2.00 GiB", 0, "79.15 GiB", "1.20 GiB", "60.00 GiB", "17.00 GiB", " Including non-PyTorch memory, this process has 77.90 GiB memory in use."), {"cause": "fragmentation", "reserved_bytes": 77 * G}),
    ("torch hip", torch_new("516.00 MiB", 0, "15.93 GiB", "72.00 MiB", "15.50 GiB", "200.00 MiB", platform="HIP"), {"family": "pytorch", "cause": "capacity"}),
    ("torch hip fragmented", torch_new("516.00 MiB", 0, "15.93 GiB", "72.00 MiB", "12.50 GiB", "3.20 GiB", platform="HIP"), {"cause": "fragmentation", "code": "PYTORCH_HIP_ALLOC_CONF"}),
    ("torch allowed", torch_new("20.00 MiB", 0, "79.15 GiB", "70.00 GiB", "1.00 GiB", "4.00 MiB", " 2.10 GiB allowed;"), {"cause": "capacity", "limit_bytes": round(2.1 * G)}),
    ("torch wrapped", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n(GPU 0; 11.80 GiB total capacity; 9.05 GiB already allocated;\n1.11 GiB free; 9.33 GiB reserved in total by PyTorch)", {"requested_bytes": 2 * G}),
    ("torch rank", "[rank3]: torch.OutOfMemoryError: " + torch_new("96.00 MiB", 3, "39.39 GiB", "60.00 MiB", "38.00 GiB", "500.00 MiB"), {"device": "GPU:3"}),
    ("torch error", "torch.AcceleratorError: CUDA error: out of memory", {"family": "pytorch"}),
    ("torch mps", "RuntimeError: MPS backend out of memory (MPS allocated: 6.00 GB, other allocations: 2.00 GB, max allowed: 9.00 GB). Tried to allocate 2.00 GB on private pool.", {"requested_bytes": 2 * G, "limit_bytes": 9 * G, "free_bytes": G, "cause": "capacity"}),
    ("torch cpu", "RuntimeError: [enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 61234567 bytes. Error code 12 (Cannot allocate memory)", {"requested_bytes": 61234567, "device": "host"}),
    # Theano, CUDA
    ("theano", "Error allocating 70254592 bytes of device memory (out of memory). Driver report 21889024 bytes free and 4026466304 bytes total", {"family": "theano", "requested_bytes": 70254592, "free_bytes": 21889024, "limit_bytes": 4026466304, "cause": "capacity"}),
    ("theano fragmented", "Error allocating 50000000 bytes of device memory (out of memory). Driver report 90000000 bytes free and 2147287040 bytes total", {"cause": "fragmentation"}),
    ("theano cnmem", "MemoryError: Error allocating 205520896 bytes of device memory (CNMEM_STATUS_OUT_OF_MEMORY).\nInputs shapes: [(64, 64, 112, 112), (64, 3, 7, 7)]", {"family": "theano", "requested_bytes": 205520896, "tensor_shape": [64, 64, 112, 112]}),
    ("theano gpuarray", "pygpu.gpuarray.GpuArrayException: b'cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory'", {"family": "theano"}),
    ("cudnn", TIME + "E tensorflow/stream_executor/cuda/cuda_dnn.cc:329] Could not create cudnn handle: CUDNN_STATUS_ALLOC_FAILED", {"family": "cuda", "first": "memory growth"}),
    ("cublas", "E tensorflow/stream_executor/cuda/cuda_blas.cc:226] failed to create cublas handle: CUBLAS_STATUS_ALLOC_FAILED", {"family": "cuda"}),
    ("cupy", "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 4294967296 bytes (allocated so far: 900 bytes).", {"family": "cuda", "requested_bytes": 4 * G}),
    ("cupy, wrapped", "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating\n8,589,934,592 bytes (allocated so far: 12,884,901,888 bytes, limit set to: 17,179,869,184 bytes).", {"family": "cuda", "requested_bytes": 8 * G, "in_use_bytes": 12 * G, "limit_bytes": 16 * G}),
    ("cupy, wrapped after the name", "cupy.cuda.memory.OutOfMemoryError:\nOut of memory allocating 8,589,934,592 bytes (allocated\nso far: 1,024 bytes).", {"family": "cuda", "requested_bytes": 8 * G}),
    ("cupy, commas", "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 8,589,934,592 bytes (allocated so far: 1,024 bytes).", {"family": "cuda", "requested_bytes": 8 * G}),
    ("mxnet", "mxnet.base.MXNetError: [10:11:12] src/storage/./pooled_storage_manager.h:161: cudaMalloc retry failed: out of memory", {"family": "cuda", "device": "GPU"}),
    ("cuda driver", "CUDA_ERROR_OUT_OF_MEMORY: out of memory", {"family": "cuda"}),
    # host
    ("numpy", "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 4.49 GiB for an array with shape (4000, 224, 224, 3) and data type float64", {"family": "host", "requested_bytes": 4000 * 224 * 224 * 3 * 8, "dtype": "float64", "first": "float32"}),
    ("numpy float32", "MemoryError: Unable to allocate 2.24 GiB for an array with shape (4000, 224, 224, 3) and data type float32", {"first": "Stream"}),
    ("numpy old", "MemoryError: Unable to allocate array with shape (90000, 90000) and data type float64", {"requested_bytes": 90000 * 90000 * 8}),
    ("python", 'Traceback (most recent call last):\n  File "a.py", line 3\nMemoryError', {"family": "host", "cause": "unknown"}),
    ("c++", "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\nAborted (core dumped)", {"family": "host"}),
    ("errno 12", "OSError: [Errno 12] Cannot allocate memory", {"family": "host"}),
    ("kernel", kernel("python3", 4242, 62_914_560), {"family": "host", "in_use_bytes": 62_914_560 * 1024, "cause": "capacity"}),
    (
        "kernel, cgroup",
        "memory: usage 16777216kB, limit 16777216kB, failcnt 9\n[1.5] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,task=python,pid=7\nmemory: usage 16777216kB, limit 16777216kB, failcnt 9\n" + kernel("python", 7, 16_000_000, True),
        {"limit_bytes": 16 * G, "in_use_bytes": 16_000_000 * 1024},
    ),
    ("kernel, old", "Mar  4 05:06:07 node9 kernel: Out of memory: Kill process 3121 (python) score 912 or sacrifice child\nMar  4 05:06:07 node9 kernel: Killed process 3121 (python) total-vm:9000000kB, anon-rss:7000000kB, file-rss:0kB", {"in_use_bytes": 7_000_000 * 1024}),
    ("slurm", "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=991.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.", {"family": "host", "code": "--mem"}),
    ("slurm new", "slurmstepd: error: Detected 2 oom_kill events in StepId=55.0. Some of the step tasks have been OOM Killed.\nsrun: error: gpu7: task 0: Out Of Memory", {"family": "host"}),
    ("slurm old", "slurmstepd: error: Job 4711 exceeded memory limit (8400000 > 8388608), being killed\nslurmstepd: error: Exceeded job memory limit", {"limit_bytes": 8 * G, "in_use_bytes": 8_400_000 * 1024}),
    ("slurm step", "slurmstepd: error: Exceeded job memory limit", {"family": "host"}),
    ("pbs", "=>> PBS: job killed: mem 9000000kb exceeded limit 8388608kb", {"limit_bytes": 8 * G}),
    ("lsf", "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", {"family": "host"}),
    ("killed", "Epoch 3/20\nKilled", {"family": "host", "cause": "unknown"}),
    ("killed by a script", "/var/spool/slurmd/job9/slurm_script: line 21:  7043 Killed                  python3 train.py --epochs 5", {"family": "host"}),
    ("exit 137", "worker exited with code 137", {"family": "host"}),
    ("kubernetes", "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137", {"family": "host", "code": "memory"}),
    ("docker", '"State": {"Status": "exited", "OOMKilled": true, "ExitCode": 137}', {"family": "host"}),
    ("workers", "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed.", {"family": "host"}),
    ("subprocess", "subprocess.CalledProcessError: Command 'train' died with <Signals.SIGKILL: 9>.", {"family": "host"}),
    ("shell status", "make: *** [Makefile:9: train] returned non-zero exit status 137", {"family": "host"}),
    ("ide", "Process finished with exit code 137 (interrupted by signal 9: SIGKILL)", {"family": "host"}),
]  # fmt: skip

# name, text, the family
NEGATIVE = [
    ("disk", "OSError: [Errno 28] No space left on device: 'ckpt-7.keras'", "disk"),
    ("disk, h5py", "OSError: Unable to synchronously create file (unable to write: errno = 28, error message = 'No space left on device')", "disk"),
    ("disk, tf", "tensorflow.python.framework.errors_impl.ResourceExhaustedError: ckpt/variables; No space left on device [Op:SaveV2]", "disk"),
    ("quota of the disk", "OSError: [Errno 122] Disk quota exceeded", "disk"),
    ("shared memory", "RuntimeError: DataLoader worker (pid 88) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory: insufficient shared memory (shm).", "disk"),
    ("not a failure", warned("3.10GiB") + " with freed_by_count=0. The caller indicates that this is not a failure, but this may mean that there could be performance gains if more memory were available.", "notice"),
    ("not a failure, wrapped", warned("3.10GiB") + " with freed_by_count=0.\nThe caller indicates that this is not a failure, but this may mean that there could be performance gains if more memory were available.", "notice"),
    ("whole card", "\n".join(f"{TIME}E cuda_driver.cc:802] failed to allocate {g}G ({int(g * G)} bytes) from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory" for g in (8.0, 7.2, 6.48)), "notice"),
    ("host notice", "Allocation of 1207959552 exceeds 10% of free system memory.", "notice"),
    ("tcmalloc", "tcmalloc: large alloc 8589934592 bytes == 0x5581 @ 0x7f", "notice"),
    ("rematerialization", "W external/xla/xla/service/hlo_rematerialization.cc:2946] Can't reduce memory use below 10.1GiB by rematerialization; only reduced to 11.0GiB", "notice"),
    ("retry", "UNAVAILABLE: failed to connect to all addresses. Retrying in 4 s", "notice"),
    ("slurm swap", "slurmstepd: error: Exceeded step memory limit at some point. Step may have been partially swapped out to disk.", "notice"),
    ("library", TIME + "W tensorflow/stream_executor/platform/default/dso_loader.cc:64] Could not load dynamic library 'libcudnn.so.8'; dlerror: libcudnn.so.8: cannot open shared object file", "library"),
    ("dlopen", "W tensorflow/core/common_runtime/gpu/gpu_device.cc:1960] Cannot dlopen some GPU libraries.", "library"),
    ("grpc", "grpc._channel._InactiveRpcError: status = StatusCode.RESOURCE_EXHAUSTED details = \"Received message larger than max (9437184 vs. 4194304)\"", "limit"),
    ("grpc, a rendezvous", 'grpc._channel._MultiThreadedRendezvous: <... terminated with:\n\tstatus = StatusCode.RESOURCE_EXHAUSTED\n\tdetails = "Bandwidth exhausted"', "limit"),
    ("grpc, tf", "tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node __wrapped__RpcCall}}\ngRPC: Received message larger than max (20971520 vs. 4194304) [Op:RpcCall]", "limit"),
    ("quota of a TPU", '"message": "Limit: 0 in zone.",\n"status": "RESOURCE_EXHAUSTED"', "limit"),
    ("quota", "google.api_core.exceptions.ResourceExhausted: 429 Quota exceeded for quota metric 'Requests'", "limit"),
    ("fork", "BlockingIOError: [Errno 11] Resource temporarily unavailable", "limit"),
    ("threads", "RuntimeError: can't start new thread", "limit"),
    ("files", "OSError: [Errno 24] Too many open files", "limit"),
    ("shape", "ValueError: Input 0 of layer \"dense_4\" is incompatible with the layer: expected axis -1 of input shape to have value 64", "shape"),
    ("shape, op", "InvalidArgumentError: Incompatible shapes: [32,10] vs. [16,10]", "shape"),
    ("nan", "Epoch 2/9\n 40/40 - 3s - loss: nan - accuracy: 0.1000", "nan"),
    ("time limit", "slurmstepd: error: *** JOB 77 ON n4 CANCELLED AT 2025-03-04T05:06:07 DUE TO TIME LIMIT ***\nKilled", "stopped"),
    ("illegal access", "RuntimeError: CUDA error: an illegal memory access was encountered", "crash"),
    ("cudnn handle", "Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED", None),
    ("docker fine", '"State": {"Status": "exited", "OOMKilled": false, "ExitCode": 1}', None),
    ("prose", "If training should run out of memory, use a smaller batch size. See the page on OOM errors.", None),
    ("code", "    except MemoryError:\n        raise SystemExit('no memory')\nexcept (OSError, MemoryError) as error:", None),
    ("progress", "137/1563 [==>....] - ETA: 1:37 - loss: 0.4137", None),
    ("memory report", "GPU memory in use: 3.2 GiB of 16 GiB", None),
    ("step 137", "status: ok, step 137 of 900, memory 3 GiB", None),
    ("shutdown", "Sending SIGKILL to processes that ignored SIGTERM", None),
    ("exit 1", "Process finished with exit code 1", None),
    ("empty", "", None),
    ("blank", "\n\n  \n", None),
]  # fmt: skip
