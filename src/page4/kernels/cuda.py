"""Compiled CUDA kernels on the current device: loading, and launching on torch's current stream.

cuda-core does both; see `nvrtc` for why it does not compile. A launch allocates nothing and waits for nothing, so it
can be captured. Loading is done when a function is asked for, so ask once before a capture.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from page4.errors import KernelError, message
from page4.kernels import cuda_build

if TYPE_CHECKING:
    import torch

_INT32 = range(-(1 << 31), 1 << 31)
_functions: dict[tuple[Any, ...], Function] = {}
_LOCK = threading.Lock()


@dataclass
class Function:
    """A kernel loaded on one device."""

    name: str
    arch: str
    kernel: Any
    device: int
    resources: cuda_build.Resources | None
    argument_bytes: tuple[int, ...]
    _configs: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)
    # Static and dynamic shared memory together are free up to 48 KiB; asking for every size need not know the former.
    _allowed_shared_bytes: int = 0


def refusal() -> str | None:
    """None when cuda-core is installed and torch sees a GPU, else the reason."""
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None if _core_version() is not None else "cuda-core is not installed (pip install 'page4[gpu]')"


@functools.cache
def _core_version() -> str | None:
    try:
        import cuda.core
    except ImportError:
        return None
    return str(cuda.core.__version__)


def capability(device: torch.device | int | None = None) -> tuple[int, int]:
    """Compute capability of a device (None: the current one)."""
    import torch

    return torch.cuda.get_device_capability(device)


def device() -> torch.device:
    """The current CUDA device of torch."""
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def current_device() -> int:
    """Index of torch's current device."""
    import torch

    return torch.cuda.current_device()


def stream_handle(device: torch.device | int | None = None) -> int:
    """The current stream of torch on a device, as the driver knows it."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def function(source: str, name: str, *, arch: str, defines: Mapping[str, str | int] | None = None) -> Function:
    """Kernel `name` (extern "C") of `source` on the current device; compiled and loaded when first asked for.

    Raises `KernelError` as `cuda_build.compile` does, when cuda-core is missing, and for an unknown kernel.
    """
    import torch

    key = (torch.cuda.current_device(), source, name, arch, tuple(sorted((defines or {}).items())))
    found = _functions.get(key)
    if found is None:
        with _LOCK:
            found = _functions.setdefault(key, _loaded(source, name, arch, defines, key[0]))
    return found


def _loaded(source: str, name: str, arch: str, defines: Mapping[str, str | int] | None, device: int) -> Function:
    if _core_version() is None:
        do = "pip install 'page4[gpu]'"
        raise KernelError(message("CUDA kernels", allowed="cuda-core to load them", got="none installed", do=do))
    from cuda.core import Device, ObjectCode

    compiled = cuda_build.compile(source, arch=arch, defines=defines)
    Device(device).set_current()
    load = ObjectCode.from_ptx if compiled.is_ptx else ObjectCode.from_cubin
    try:
        kernel = load(compiled.image).get_kernel(name)
        _load_now(kernel)
        argument_bytes = tuple(size for _, size in kernel.arguments_info)
    except Exception as error:
        got = " ".join(f"{type(error).__name__}: {error}".split())
        do = "look whether the driver is older than the compiler, or the GPU another one than the target"
        raise KernelError(message(f"{source} {name}", allowed=f"loaded for {arch}", got=got, do=do)) from error
    return Function(name, arch, kernel, device, compiled.resources.get(name), argument_bytes)


def _load_now(kernel: Any) -> None:
    """Drivers load lazily, at a first launch; one inside a capture must not have to."""
    from cuda.bindings import driver

    status, loaded = driver.cuKernelGetFunction(driver.CUkernel(int(kernel.handle)))
    if status == driver.CUresult.CUDA_SUCCESS:
        (status,) = driver.cuFuncLoad(loaded)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status)


def launch(
    function: Function,
    grid: Sequence[int],
    block: Sequence[int],
    args: Sequence[object],
    *,
    shared_bytes: int = 0,
    dependent: bool = False,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Launches a kernel on torch's current stream, or on `stream`.

    args: tensors and None are pointers, an int is as wide as the kernel declares it (4 or 8 bytes), a float is fp32,
    ctypes scalars are passed as they are; `KernelError` when number or sizes differ from the kernel's.
    shared_bytes: dynamic. dependent: the kernel may start while the one before it in the stream still runs
    (programmatic dependent launch, sm_90) and waits for its results by itself. An empty grid is no launch.
    """
    if 0 in tuple(grid):
        return
    import torch
    from cuda.core import launch as start

    if shared_bytes > function._allowed_shared_bytes:
        _allow_shared_bytes(function, shared_bytes)
    key = (tuple(grid), tuple(block), shared_bytes, dependent)
    config = function._configs.get(key) or _config(function, key)
    on = torch.cuda.current_stream(function.device) if stream is None else stream
    start(_stream(function.device, on.cuda_stream), config, function.kernel, *_arguments(function, args))


@functools.cache
def _stream(device: int, handle: int) -> Any:
    """A stream of torch as cuda-core takes one; only named by its handle, never owned."""
    from cuda.core import Stream

    return Stream.from_handle(handle)


def _config(function: Function, key: tuple[Any, ...]) -> Any:
    from cuda.core import LaunchConfig

    grid, block, shared_bytes, dependent = key
    more = {"programmatic_stream_serialization": True} if dependent else {}
    config = LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes, **more)
    if len(function._configs) >= 256:  # prefill lengths are many
        function._configs.clear()
    function._configs[key] = config
    return config


def _arguments(function: Function, args: Sequence[object]) -> list[object]:
    """As cuda-core takes them: a pointer is a plain int, a scalar one of ctypes."""
    sizes = function.argument_bytes
    if len(args) != len(sizes):
        do = "pass what the kernel declares"
        raise KernelError(message(function.name, allowed=f"{len(sizes)} arguments", got=len(args), do=do))
    return [_argument(value, size) for value, size in zip(args, sizes, strict=True)]


def _argument(value: object, size: int) -> object:
    pointer = getattr(value, "data_ptr", None)
    if pointer is not None:
        found, given = pointer(), 8
    elif value is None:
        found, given = 0, 8
    elif isinstance(value, float):
        found, given = ctypes.c_float(value), 4
    elif isinstance(value, int) and (size == 8 or value in _INT32):
        found, given = ctypes.c_int64(value) if size == 8 else ctypes.c_int32(value), size
    else:
        found, given = value, ctypes.sizeof(value) if isinstance(value, ctypes._SimpleCData) else 0
    if given != size:
        do = "pass what the kernel declares"
        raise KernelError(message("argument", allowed=f"{size} bytes", got=f"{type(value).__name__} {value}", do=do))
    return found


def _allow_shared_bytes(function: Function, shared_bytes: int) -> None:
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    handle = driver.CUkernel(int(function.kernel.handle))
    (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, handle, driver.CUdevice(function.device))
    if status != driver.CUresult.CUDA_SUCCESS:
        do = "take a kernel with a smaller tile"
        raise KernelError(message(function.name, allowed="less shared memory", got=f"{shared_bytes} bytes", do=do))
    function._allowed_shared_bytes = shared_bytes
