"""A GPU for the tests of this folder: a real one, and, everywhere, one that is pretended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TRANSFERS = ("aten::copy_", "aten::_to_copy", "aten::set_")  # what may read one device and write another
LOOKUPS = ("aten::index.", "aten::index_put")  # whose indices may lie on the CPU
ONLY_CUDA: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.mm.dtype: lambda a, b, dtype: a.to(dtype) @ b.to(dtype)
}
GETTERS: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "is_cuda": lambda device: device.type == "cuda",
    "is_cpu": lambda device: device.type == "cpu",
}


def tensors_of(given: Any) -> list[torch.Tensor]:
    """Those among arguments, and in the lists among them."""
    found = []
    for x in given:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += tensors_of(x)
    return found


class PretendedGpu(TorchFunctionMode):
    """Inside, ``cuda`` is a device whose tensors lie in the CPU's memory, each with a mark that it is not the
    CPU's.

    They say that they are on ``cuda:0``, so that branches for a GPU are taken; results are real, and so are
    gradients. An operator that is given tensors of both devices raises, as on a GPU, at whatever depth it is
    called, in a backward too. What only a GPU's own kernels could show (their rounding, what they do not
    implement, its memory, its random numbers) stays unseen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.marked: set[int] = set()  # storages
        self.made_on: list[Any] = [
            CPU
        ]  # where a tensor that comes from none is made: a device, or that of some arguments
        self.below = _Operators(self)

    def __enter__(self) -> PretendedGpu:
        super().__enter__()
        self.below.__enter__()
        for (
            name,
            getter,
        ) in GETTERS.items():  # asked by Python's code in a hook or a backward, too, where a mode is off
            setattr(
                torch.Tensor, name, property(lambda tensor, getter=getter: getter(self.device_of(tensor)))
            )
        self.run_backward, torch.autograd._engine_run_backward = (
            torch.autograd._engine_run_backward,
            self._backward,
        )
        return self

    def __exit__(self, *error: Any) -> None:
        torch.autograd._engine_run_backward = self.run_backward
        for name in GETTERS:
            delattr(torch.Tensor, name)
        self.below.__exit__(*error)
        super().__exit__(*error)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        with torch._C.DisableTorchFunction():
            own = torch._C.TensorBase.device.__get__(tensor)
            return GPU if own == CPU and tensor.untyped_storage()._cdata in self.marked else own

    @property
    def place(self) -> torch.device:
        made_on = self.made_on[-1]
        if isinstance(made_on, torch.device):
            return made_on
        return GPU if any(self.device_of(x) == GPU for x in tensors_of(made_on)) else CPU

    def mark(self, tensor: torch.Tensor, device: torch.device) -> None:
        key = tensor.untyped_storage()._cdata
        if device == GPU and key not in self.marked:
            self.marked.add(key)
            weakref.finalize(tensor.untyped_storage(), self.marked.discard, key)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        where: Any = (*args, *kwargs.values())  # what it is made of says where, if it is asked
        if func is torch.Tensor.numpy and self.device_of(args[0]) == GPU:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            func, args = torch.Tensor.to, (args[0], GPU if func is torch.Tensor.cuda else CPU)
        if func is torch.Tensor.to:
            return self._move(args, kwargs)
        if kwargs.get("device") is not None:
            wanted = torch.device(kwargs["device"])
            if wanted.type == "cuda":
                where, kwargs["device"] = GPU, CPU
            elif wanted.type == "cpu":
                where = CPU
        self.made_on.append(where)
        try:
            found = func(*args, **kwargs)
        finally:
            self.made_on.pop()
        if kwargs.get("device") is not None and isinstance(found, torch.Tensor):
            self.mark(found, where)
        return found

    def _backward(self, *args: Any, **kwargs: Any) -> Any:
        """What a backward calls of Python's, custom functions and what is computed again, is to be seen,
        too.
        """
        super().__enter__()  # a mode is off while it works
        try:
            return self.run_backward(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _move(self, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        source, *rest = args
        if rest and isinstance(rest[0], torch.Tensor):
            rest = [self.device_of(rest[0]), rest[0].dtype, *rest[1:]]
        copy = bool(kwargs.pop("copy", False))
        device, dtype, _, layout = torch._C._nn._parse_to(*rest, **kwargs)
        if device is not None and device.type == "meta":
            return torch.Tensor.to(source, *rest, **kwargs)
        target = self.device_of(source) if device is None else GPU if device.type == "cuda" else CPU
        more = {} if layout is None else {"memory_format": layout}
        if target == self.device_of(source):
            return torch.Tensor.to(source, dtype=source.dtype if dtype is None else dtype, copy=copy, **more)
        self.below.crossing = True
        self.made_on.append(target)
        try:
            return torch.Tensor.to(source, dtype=dtype, copy=True, **more)
        finally:
            self.made_on.pop()
            self.below.crossing = False


class _Operators(TorchDispatchMode):
    def __init__(self, above: PretendedGpu) -> None:
        super().__init__()
        self.above = above
        self.crossing = False  # a tensor is being moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_of((*args, *kwargs.values())) if kwargs else tensors_of(args)
        places, name = {id(x): self.above.device_of(x) for x in given}, func.name()
        devices = {places[id(x)] for x in given if x.ndim}
        lookup = name.startswith(LOOKUPS)
        if lookup:  # self, indices, values
            devices = {places[id(x)] for x in (args[0], *args[2:3]) if isinstance(x, torch.Tensor) and x.ndim}
            if places[id(args[0])] == CPU and any(x is not None and places[id(x)] == GPU for x in args[1]):
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor (cpu), "
                    f"in {name}"
                )
        if {CPU, GPU} <= devices and not name.startswith(TRANSFERS):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! in {name}"
            )
        out = ONLY_CUDA.get(func, func)(*args, **(kwargs or {}))
        if self.crossing or not given:
            where = self.above.place
        else:
            where = places[id(args[0])] if lookup else GPU if GPU in places.values() else CPU
        storages = {x.untyped_storage()._cdata for x in given if places[id(x)].type != "meta"}
        for tensor in tensors_of((out,)):
            if not tensor.is_meta and tensor.untyped_storage()._cdata not in storages:
                self.above.mark(tensor, where)
        return out


@pytest.fixture(params=["pretended", pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """A CUDA device: one that is pretended, and a real one where there is one."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and there is none here")
        yield GPU
        return
    with PretendedGpu():
        yield GPU


@pytest.fixture
def pretended_gpu() -> type[PretendedGpu]:
    return PretendedGpu
