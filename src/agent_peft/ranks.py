"""The processes that train together, as torchrun starts them. One alone asks nobody, and everything here
gives back what it was given.

Groups are shared out: rank r of W collects, and learns from, those at positions r, r + W, … Everything that
decides anything (advantages' means, denominators, gradients, metrics) is summed over the ranks first, so that
all decide alike and do what one rank would have done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, distributed
from torch.nn import Parameter

from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError

T = TypeVar("T")
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes
TORCHRUN = "torchrun --nproc_per_node=N -m agent_peft train CONFIG"


class RanksConfig(BaseModel):
    """How processes train together. How many there are is torchrun's word, and none of this changes what
    is trained.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout: float = Field(
        default=1800.0, gt=0, description="seconds that a rank waits for the others before it gives up"
    )
    allow_other_number: bool = Field(
        default=False,
        description="go on from a checkpoint of another number of ranks: equal but for rounding",
    )


@dataclass(frozen=True)
class Ranks:
    """This process among ``world``. What takes part in is written for all ranks to call, in the same order.

    >>> alone = Ranks()
    >>> alone.share(["a", "b", "c"]), alone.gather_objects({"x": 1}), alone.broadcast(lambda: 7)
    (['a', 'b', 'c'], [{'x': 1}], 7)
    >>> Ranks(rank=1, world=2).share(["a", "b", "c"])
    ['b']
    """

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether it is the one that writes files and speaks."""
        return self.rank == 0

    @overload
    def share(self, things: range) -> range: ...
    @overload
    def share(self, things: Sequence[T]) -> Sequence[T]: ...
    def share(self, things: Any) -> Any:
        """This rank's part: those at positions rank, rank + world, …"""
        return things[self.rank :: self.world]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, the same bits on each."""
        if self.world == 1:
            return tensor
        total = tensor.detach().clone()
        with _together():
            distributed.all_reduce(total)
        return total

    def gather_objects(self, content: Any) -> list[Any]:
        """What each rank gave, by rank; anything fit for JSON. It travels as JSON, never as pickle."""
        if self.world == 1:
            return [content]
        written = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        with _together():
            distributed.all_gather(sizes, torch.tensor([len(written)]))
            longest = max(int(size) for size in sizes)
            pieces = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
            distributed.all_gather(pieces, torch.cat([written, written.new_zeros(longest - len(written))]))
        return [
            json.loads(piece[: int(size)].numpy().tobytes())
            for piece, size in zip(pieces, sizes, strict=True)
        ]

    def broadcast(self, make: Callable[[], T]) -> T:
        """What ``make`` gives on rank 0, where alone it is called; fit for JSON. The others wait for it."""
        if self.world == 1:
            return make()
        found: T = self.gather_objects(make() if self.leads else None)[0]
        return found

    def barrier(self) -> None:
        """Until all are here."""
        self.broadcast(lambda: None)

    def sum_named(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars by name, each summed over the ranks that have it, in fp64."""
        if self.world == 1:
            return dict(sums)
        totals: dict[str, float] = {}
        for found in self.gather_objects({name: float(value) for name, value in sums.items()}):
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in totals.items()}

    def sum_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Add up the gradients in one flat fp32 vector. A parameter without one on every rank stays
        without.
        """
        if self.world == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        flat = self.sum(torch.cat([*(gradient.float().flatten() for gradient in gradients), present]))
        *pieces, anywhere = torch.split(flat, [*(p.numel() for p in parameters), len(present)])
        for parameter, piece, there in zip(parameters, pieces, anywhere.tolist(), strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype) if there else None

    def assert_equal(self, parameters: Iterable[Tensor], what: str) -> None:
        """
        Raises:
            TrustError: they are not the same, to the bit, on all ranks.
        """
        if self.world > 1 and len(set(self.gather_objects(checksum(parameters)))) > 1:
            raise TrustError(
                f"{what} differ between the ranks, so they would not train the same policy: give every rank the same model"
            )


ALONE = Ranks()


def checksum(parameters: Iterable[Tensor]) -> int:
    """Of the bits, in any order within a parameter: cheap, exact, and the same on every device.

    >>> ones = torch.ones(3)
    >>> checksum([ones]) == checksum([torch.ones(3)]) != checksum([ones.nextafter(torch.tensor(2.0))])
    True
    """
    sums = [p.detach().view(INTEGERS[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    return derive(0, *torch.stack(sums).tolist()) if sums else 0


@contextmanager
def join(config: RanksConfig, device: str) -> Iterator[Ranks]:
    """The ranks that torchrun started, of which this is one: gloo between CPUs, NCCL between GPUs, of which
    each rank gets its own.

    Args:
        device: ``policy.device``. ``auto`` is the GPU of the rank's number where there are GPUs.

    Raises:
        AgentPeftError: half of what torchrun sets is not set, or there are too few GPUs.
        InfrastructureError: the others did not come, or ended.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    missing = [
        name
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise AgentPeftError(
            f"WORLD_SIZE is {world}, but {missing[0]} is not set: start with {TORCHRUN}, or unset WORLD_SIZE"
        )
    rank, local, neighbours = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        if device.startswith("cuda:") and neighbours > 1:
            raise AgentPeftError(
                f"policy.device: {device} is one GPU, and torchrun started {neighbours} ranks here; set policy.device=auto"
            )
        if local >= torch.cuda.device_count():
            have = f"this machine has {torch.cuda.device_count()} GPUs"
            raise AgentPeftError(
                f"{have}, and torchrun started {neighbours} ranks on it; lower --nproc_per_node, or set policy.device=cpu"
            )
        torch.cuda.set_device(torch.device(device) if device.startswith("cuda:") else local)
    with _together():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=config.timeout)
        )
    # after an error nothing is cleared away: the others may be waiting in a collective, and a process that
    # ends ends them, too
    ranks = Ranks(rank, world)
    yield ranks
    ranks.barrier()
    distributed.destroy_process_group()


@contextmanager
def _together() -> Iterator[None]:
    """What waits for the others. That one of them ended is told in a line; its own words say why."""
    try:
        yield
    except RuntimeError as error:  # all that torch.distributed raises
        cause = " ".join(str(error).split())[:200]
        raise InfrastructureError(
            f"another rank has ended or does not answer; its own message says why ({cause})"
        ) from error
