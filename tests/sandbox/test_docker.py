"""Tests of containers without an engine. test_sandbox.py runs containers where an engine answers."""

import socket
import struct
import tarfile
from io import BytesIO

import pytest

from agent_peft.sandbox import docker_api
from agent_peft.sandbox.base import SandboxLimits
from agent_peft.sandbox.streams import StreamKind

LIMITS = SandboxLimits(memory_mb=128, processes=32, file_size_mb=16)


def test_containers_have_the_same_limits():
    docker = pytest.importorskip("docker")
    config = docker.types.HostConfig(version="1.44", **docker_api.host_config(LIMITS))
    assert config["Memory"] == config["MemorySwap"] == 128 << 20 and config["PidsLimit"] == 32
    assert (
        config["NetworkMode"] == "none"
        and config["CapDrop"] == ["ALL"]
        and "SYS_ADMIN" not in config["CapAdd"]
    )
    assert (
        config["SecurityOpt"] == ["no-new-privileges:true"] and config["AutoRemove"] and "Binds" not in config
    )
    assert {"Name": "fsize", "Soft": 16 << 20, "Hard": 16 << 20} in config["Ulimits"]


def test_the_changes_of_a_container_are_packed():
    def tar(name, content=b"", kind=tarfile.REGTYPE):
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            entry = tarfile.TarInfo(name)
            entry.size, entry.type, entry.uid = len(content), kind, 7
            archive.addfile(entry, BytesIO(content))
        return [packed.getvalue()[i : i + 700] for i in range(0, len(packed.getvalue()), 700)]

    files = {"/srv": tar("srv", kind=tarfile.DIRTYPE), "/srv/a": tar("a", b"x" * 3000)}
    changes = [{"Path": "/srv/a", "Kind": 1}, {"Path": "/srv", "Kind": 0}, {"Path": "/etc/issue", "Kind": 2}]
    content, deleted = docker_api.pack_changes(changes, files.__getitem__)
    assert deleted == ["/etc/issue"]
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        assert [(member.name, member.size, member.uid, member.isdir()) for member in archive] == [
            ("srv", 0, 7, True),
            ("srv/a", 3000, 7, False),
        ]


def test_frames_of_an_engine_become_streams():
    ours, theirs = socket.socketpair()
    streams = docker_api.FrameStreams(ours, lambda: 3)
    streams.write(b"typed")
    assert theirs.recv(10) == b"typed"
    frames = struct.pack(">BxxxL", 1, 3) + b"out" + struct.pack(">BxxxL", 2, 4) + b"mark"
    theirs.sendall(frames[:9])
    assert streams.read(1) == []
    theirs.sendall(frames[9:])
    theirs.close()
    chunks = [*streams.read(1), *streams.read(1)]
    assert chunks == [(StreamKind.OUTPUT, b"out"), (StreamKind.CONTROL, b"mark"), (StreamKind.END, b"3")]
    streams.close()
