"""A bad network cable: what a host sends comes late, and some of it not at all.

``bad_cable.py VETH TAP BRIDGE DELAY_MS LOSS`` takes the host's end of the cable VETH out of BRIDGE and puts TAP there, and
carries the frames between them. The kernel's netem does the same, but not every kernel has it. Frames keep their offload
header (``struct virtio_net_hdr``), so that large segments pass as a whole: like netem, this loses segments, not packets.

It writes "ready" when it carries frames, and goes on until it is killed, when TAP goes with it, or until TAP is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x1, 0x2, 0x4
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_ETH_P_ALL = 3
_HEADER = 10
_LARGEST = 1 << 17


def open_tap(name: str) -> int:
    """A new tap device, non-blocking."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return tap


def open_veth(name: str) -> int:
    """A non-blocking socket for all that the host sends, and to send to it."""
    veth = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    veth.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    veth.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    veth.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 1 << 26)
    veth.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 26)
    veth.bind((name, _ETH_P_ALL))
    veth.setblocking(False)
    return veth.detach()


def frames(source: int) -> list[bytes]:
    """Up to 64 frames that have arrived."""
    found: list[bytes] = []
    with contextlib.suppress(OSError):  # there is none, or the cable is out
        while len(found) < 64:
            found.append(os.read(source, _LARGEST))
    return found


def send(target: int, frame: bytes) -> None:
    """Send a frame, unless the cable is out or the queue is full: then it is lost."""
    with contextlib.suppress(OSError):
        os.write(target, frame)


def carry(veth: int, tap: int, delay: float, loss: float) -> None:
    """Carry frames until `tap` is removed."""
    luck = random.Random(1)
    late: deque[tuple[float, bytes]] = deque()
    poll = select.poll()
    poll.register(veth, select.POLLIN)
    poll.register(tap, select.POLLIN)
    while True:
        timeout = max(0.0, late[0][0] - time.monotonic()) * 1000 if late else None
        if (tap, select.POLLERR) in poll.poll(timeout):
            return
        now = time.monotonic()
        late.extend((now + delay, frame) for frame in frames(veth) if luck.random() >= loss)
        while late and late[0][0] <= now:
            send(tap, late.popleft()[1])
        for frame in frames(tap):
            send(veth, frame)


def main() -> None:
    veth_name, tap_name, bridge, delay_ms, loss = sys.argv[1:]
    tap = open_tap(tap_name)
    moves = f"link set {veth_name} nomaster\nlink set {tap_name} master {bridge} up\n"
    veth = open_veth(veth_name)
    subprocess.run(["ip", "-batch", "-"], input=moves, text=True, check=True)
    os.nice(-10)
    print("ready", flush=True)
    carry(veth, tap, float(delay_ms) / 1000, float(loss))


if __name__ == "__main__":
    main()
