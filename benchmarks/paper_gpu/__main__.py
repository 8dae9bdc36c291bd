"""Run a Python program on a GPU that exists on paper alone, where there is none.

It needs Linux, a C compiler with binutils, and a CUDA build of torch (CUDA 13; tried with torch 2.14.1+cu130), whose
packages bring the headers. `paper_gpu.c` stands in for the CUDA runtime: torch's own caching allocator, its counters,
profiler, events, streams and hooks run as on a device of PAPER_GPU_GIB (80) with compute capability PAPER_GPU_CAPABILITY
(80) and name PAPER_GPU_NAME, or PAPER_GPU_COUNT (1) of them. So what memadvisor records of a GPU's memory, predicts of it
and does with it can be held against `torch.cuda.max_memory_allocated` and `max_memory_reserved`, to the byte.
`paper_nccl.c` is NCCL for the ranks of one machine, each on a device of its own: messages travel through shared memory,
and sums are right.

What this cannot tell: kernels do nothing, so no value and no time means anything; all streams are in order, so no race
is found; cuDNN is off, Triton and CUDA graphs have nothing to run on, and the driver's own memory is made up.

    python benchmarks/paper_gpu -m memadvisor profile samples/train_gpt.py --device cuda
    python benchmarks/paper_gpu benchmarks/gpu_check.py --only allocator --models gpt cnn lstm moe varying
    python benchmarks/paper_gpu -m pytest -m gpu
"""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARIES = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so", "libtorch_cpu.so")
SOURCES = ("paper_gpu", "paper_nccl")
OURS = ("cuda", "__cuda", "cublas", "cupti", "nccl")
# What torch asks of NVML for expandable segments: there is a device, and nothing else is supported.
NVML = {
    "nvmlInit_v2": 0,
    "nvmlDeviceGetHandleByPciBusId_v2": 0,
    "nvmlDeviceGetGpuFabricInfoV": 3,
    "nvmlDeviceGetComputeRunningProcesses": 3,
    "nvmlDeviceGetNvLinkRemoteDeviceType": 3,
    "nvmlDeviceGetNvLinkRemotePciInfo_v2": 3,
    "nvmlSystemGetCudaDriverVersion_v2": 3,
}
FLAGS = ("-O1", "-w", "-fPIC", "-shared")


def build(folder):
    """libpaper.so, which is loaded before all others, and a driver and NVML for what torch loads by name."""
    spec = find_spec("torch")
    torch_lib = Path(spec.origin).parent / "lib" if spec is not None and spec.origin else None
    if torch_lib is None or not (torch_lib / "libtorch_cuda.so").exists():
        raise SystemExit("paper_gpu needs a CUDA build of torch; this Python has none.")
    headers = [
        next(torch_lib.parents[1].glob(f"nvidia/*/include/{name}.h"), None) for name in ("cuda", "nccl")
    ]
    if None in headers:
        raise SystemExit("paper_gpu needs the headers that torch's CUDA packages bring (nvidia/*/include).")
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text((HERE / "host_defines.h").read_text())
    for empty in (
        "crt/host_config.h",
        "cuda_fp16.h",
        "cuda_bf16.h",
        "cuda_fp8.h",
    ):  # nccl.h needs nothing of these
        (folder / empty).touch()
    paths = [f"-I{folder}", *(f"-I{header.parent}" for header in headers)]
    compiled = [folder / f"{name}.o" for name in SOURCES]
    for source, target in zip(SOURCES, compiled, strict=True):
        run("cc", *FLAGS[:3], "-c", *paths, HERE / f"{source}.c", "-o", target)
    known = {name for each in compiled for name in symbols(each, "--defined-only")}
    asked = {name for library in LIBRARIES for name in symbols(torch_lib / library, "-D", "--undefined-only")}
    silent = folder / "silent.c"  # calls that need no answer
    silent.write_text(functions(dict.fromkeys((n for n in asked - known if n.startswith(OURS)), 0)))
    run("cc", *FLAGS, *compiled, silent, "-o", folder / "libpaper.so", "-lpthread")
    named = symbols(torch_lib / "libcaffe2_nvrtc.so", "-D", "--undefined-only")
    driver = dict.fromkeys((name for name in named if name.startswith("cu")), 0)
    for library, answers in (("libcuda.so.1", driver), ("libnvidia-ml.so.1", NVML)):
        source = folder / f"{library}.c"
        source.write_text(functions(answers))
        run("cc", *FLAGS, f"-Wl,-soname,{library}", source, "-o", folder / library)


def run(*words):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words[0]} failed:\n{done.stderr}")
    return done.stdout


def symbols(file, *options):
    return [line.split()[-1].partition("@")[0] for line in run("nm", *options, file).splitlines() if line]


def functions(answers):
    return "".join(f"int {name}(void) {{ return {answer}; }}\n" for name, answer in sorted(answers.items()))


def main():
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        environment = dict(os.environ)
        for variable, first in (
            ("LD_PRELOAD", folder / "libpaper.so"),
            ("LD_LIBRARY_PATH", folder),
            ("PYTHONPATH", HERE),
        ):
            environment[variable] = os.pathsep.join(filter(None, (str(first), os.environ.get(variable))))
        raise SystemExit(subprocess.run([sys.executable, *sys.argv[1:]], env=environment).returncode)


if __name__ == "__main__":
    main()
