"""Inside the candidate's process: requests in, answers out.

The candidate shares this process and may change anything in it, so the verifier trusts nothing that it sends.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from postlude.check.isolation.host import Host
from postlude.check.isolation.results import RefusedError, materialise, sent_kind
from postlude.check.isolation.wire import DTYPES, LENGTH_BYTES, Spec, UnsendableError, flatten, lay_out, rebuild
from postlude.errors import first_line

DETAIL_CHARACTERS = 16_000
REASON_CHARACTERS = 2_000
PERTURB = -6  # M_PERTURB


class Server:
    """Requests in, answers out."""

    def __init__(self, connection: socket.socket, skipped: list[str]) -> None:
        self.connection = connection
        self.skipped = skipped
        self.host = Host()

    def serve(self) -> None:
        while True:
            self._handle(*self._receive())

    def _handle(self, request: dict[str, Any], descriptor: int | None) -> None:
        try:
            buffer = _mapped(descriptor, request["size"])
            tensors = [_view(buffer, _sent_spec(spec)) for spec in request["tensors"]]
            self._send_value(request["request"], self._answer(request["do"], rebuild(request["value"], tensors)))
        except BaseException as error:  # the candidate's own code may raise anything, SystemExit included
            self._send({"reply": request["request"], "raised": _reason(error), "details": _details(error)})

    def _answer(self, do: str, value: Any) -> Any:
        if do == "start":
            self.host.start(**value)
            return {"skipped": self.skipped}
        actions: dict[str, Callable[..., Any]] = {
            "state keys": self.host.state_keys,
            "load state": self.host.load_state,
            "read state": self.host.read_state,
            "forward": self.host.forward,
            "prepare": self.host.prepare,
            "window": self.host.window,
            "kept": self.host.read_kept,
            "poison": poison,
        }
        return actions[do](**value)

    def _send_value(self, number: int, value: Any) -> None:
        try:
            tree, found = flatten(value)
        except UnsendableError as error:
            raise RefusedError(f"the candidate returns {error}, which is neither a tensor nor a number") from None
        plain = [materialise(tensor) for tensor in found]
        layout = lay_out(plain, [tensor.device.type for tensor in found], [sent_kind(tensor) for tensor in found])
        self._send({"reply": number, "value": tree, **layout.as_json()})
        if not layout.size:
            return
        _, descriptor = self._receive()
        buffer = _mapped(descriptor, layout.size)
        for spec, tensor in zip(layout.specs, plain):
            _view(buffer, spec).copy_(tensor)
        self._send({"reply": number, "written": True})

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self.connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)

    def _receive(self) -> tuple[dict[str, Any], int | None]:
        prefix, descriptors, _, _ = socket.recv_fds(self.connection, LENGTH_BYTES, 1)
        while len(prefix) < LENGTH_BYTES:
            prefix += self._more(LENGTH_BYTES - len(prefix))
        data, size = bytearray(), int.from_bytes(prefix, "big")
        while len(data) < size:
            data += self._more(size - len(data))
        return json.loads(data), descriptors[0] if descriptors else None

    def _more(self, size: int) -> bytes:
        data = self.connection.recv(min(size, 1 << 20))
        if not data:
            os._exit(0)  # the verifier is done; threads that the candidate left running are not waited for
        return data


def poison(byte: int) -> None:
    """From now on the C library fills memory that it allocates with the complement of this byte; 0 leaves it as it is.

    Not by the variable that does the same, which would tell a candidate that it is being checked. A C library without
    this function ignores that variable as well.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(PERTURB, byte)


def _mapped(descriptor: int | None, size: int) -> Any:
    if descriptor is None:
        return None
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _sent_spec(data: dict[str, Any]) -> Spec:
    dtype = DTYPES[data["dtype"]]
    return Spec(tuple(data["shape"]), tuple(data["strides"]), dtype, data["offset"])


def _view(buffer: Any, spec: Spec) -> Any:
    """The shared bytes as a tensor."""
    if not spec.nbytes:
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    count = spec.nbytes // spec.dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=spec.dtype, count=count, offset=spec.offset)
    return flat.as_strided(spec.shape, spec.strides)


def _reason(error: BaseException) -> str:
    if isinstance(error, RefusedError):
        text = str(error)
    elif isinstance(error, SystemExit):
        text = "the candidate ends the process (sys.exit)"
    else:
        text = f"the candidate raised {first_line(error)}"
    return text[:REASON_CHARACTERS]


def _details(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-DETAIL_CHARACTERS:]
