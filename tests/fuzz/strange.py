"""Requests as nobody should send them: valid, nearly valid, and bytes that are no request at all.

Everything is drawn from one seed. What is sent goes over sockets and channels without a client
library in between, which would refuse most of it by itself.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from spared import spare, spared
from tiny_world import clip
from tritonclient.grpc import service_pb2

__all__ = ["Stranger"]

_FRAMES = clip(12, seed=77)
_METHOD = "/inference.GRPCInferenceService/"
_OUTPUTS = ("PREDICTED_FRAMES", "STATE", "PHYSICS", "CONFIDENCE", "CACHE_TIER", "EXACT", "SCORES")
_TYPES = ("BOOL", "UINT8", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES", "FP8", "", "💥")
_NUMBERS = (0, 1, -1, 2, 7, 127, 255, 256, 65536, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
_TEXTS = (
    *("", "probe", "advance", "seek", "on", "off", "nan", "-1"),
    *("\0", "a" * 5000, "💥", "../../x"),
)
_NAMES = (
    "CONTROL",
    "CONTROL_TIMES",
    "FRAMES",
    "FRAMES_ENCODED",
    "FRAME_TIMES",
    "HORIZON",
    "TEMPLATE_CONTROLS",
    "NOTHING",
    "",
)
_PARAMETERS = (
    *(
        "mode",
        "frame",
        "max_error",
        "cache",
        "prompt",
        "view",
        "seed",
        "device",
        "tenant",
        "resume",
    ),
    *("fork_of", "task", "cold_wait_ms", "canary", "sequence_id", "sequence_start", "timeout"),
    *("priority", "binary_data", "classification", "shared_memory_region", "nonsense", ""),
)
_TIMEOUT_S = 20.0


class Stranger:
    """Sends requests; `send` gives (kind, outcome). Outcomes: "answered", "refused", or what broke
    at the transport ("hung up"); a request that is not answered in time raises TimeoutError.
    last: what was sent last."""

    def __init__(self, endpoints: Any, seed: int, sessions: int = 12) -> None:
        self._draw = random.Random(seed)
        self._ids = [seed * 10_000 + n for n in range(1, sessions + 1)]
        self._begun: set[int] = set()
        self.last = b""
        self._address = endpoints.http
        self._channel = grpc.insecure_channel(
            endpoints.grpc, options=[("grpc.max_reconnect_backoff_ms", 300)]
        )
        self._http: http.client.HTTPConnection | None = None

    def send(self) -> tuple[str, str]:
        kinds: list[tuple[int, str, Callable[[], str]]] = [
            (30, "grpc valid", lambda: self._grpc(self._valid())),
            (24, "grpc nearly valid", lambda: self._grpc(self._spoilt(self._valid()))),
            (12, "grpc bytes", self._grpc_bytes),
            (4, "grpc other call", self._grpc_other),
            (12, "http valid", lambda: self._post(*self._as_http(self._valid()))),
            (12, "http nearly valid", self._http_spoilt),
            (6, "http bytes", self._http_bytes),
        ]
        [(_, kind, call)] = self._draw.choices(kinds, [weight for weight, _, _ in kinds])
        return kind, call()

    def close(self) -> None:
        self._channel.close()
        if self._http is not None:
            self._http.close()

    # -- requests ----------------------------------------------------------------------------------

    def _valid(self) -> Any:
        """A request that should be answered (as long as its session is alive)."""
        draw = self._draw
        id = draw.choice(self._ids)
        request = service_pb2.ModelInferRequest(model_name="world_model", id=str(draw.random()))
        parameters: dict[str, Any] = {"sequence_id": id}
        control = np.float32([[draw.uniform(-1, 1), draw.uniform(-1, 1)]]).round(1)
        arrays = {"CONTROL": control}
        if id not in self._begun or draw.random() < 0.03:
            parameters["sequence_start"] = True
            arrays["FRAMES"] = _FRAMES[:2]
            arrays["CONTROL"] = np.vstack([control, control])
            self._begun.add(id)
        elif draw.random() < 0.2:
            at = draw.randrange(12)
            arrays["FRAMES"] = _FRAMES[at : at + 1]
            arrays["CONTROL"] = np.vstack([control, control])
        elif draw.random() < 0.2:
            parameters["mode"] = "advance"
        elif draw.random() < 0.1:
            parameters |= {"mode": "seek", "frame": draw.randrange(3)}
        if draw.random() < 0.3:
            arrays["HORIZON"] = np.int32([draw.randint(1, 12)])
        if draw.random() < 0.3:
            parameters["max_error"] = draw.choice(["0", "0.05", "0.5"])
        if draw.random() < 0.02:
            parameters["sequence_end"] = True
            self._begun.discard(id)
        for name, array in arrays.items():
            kind = {"f": "FP32", "u": "UINT8", "i": "INT32"}[array.dtype.kind]
            request.inputs.add(name=name, datatype=kind, shape=array.shape)
            request.raw_input_contents.append(array.tobytes())
        for name in draw.sample(_OUTPUTS, draw.randint(0, len(_OUTPUTS))):
            request.outputs.add(name=name)
        for name, value in parameters.items():
            self._set(request.parameters[name], value)
        return request

    def _spoilt(self, request: Any) -> Any:
        """One to three things about it are otherwise."""
        draw = self._draw
        for _ in range(draw.randint(1, 3)):
            tensor = draw.choice(request.inputs) if request.inputs else None
            ways: list[Callable[[], None]] = [
                lambda: self._set(request.parameters[draw.choice(_PARAMETERS)], self._value()),
                lambda: setattr(request, "model_name", draw.choice(["", "no", "world_model\0"])),
                lambda: setattr(request, "model_version", draw.choice(["", "1", "9", "x"])),
                lambda: setattr(request, "id", draw.choice(_TEXTS)),
                lambda: request.outputs.extend(
                    [
                        type(request).InferRequestedOutputTensor(
                            name=draw.choice(["", "NO", "STATE"])
                        )
                    ]
                ),
                lambda: request.raw_input_contents.append(draw.randbytes(draw.randrange(40))),
                lambda: request.ClearField(draw.choice(["inputs", "parameters"])),
            ]
            if tensor is not None:
                at = list(request.inputs).index(tensor)
                ways += [
                    lambda tensor=tensor: setattr(tensor, "datatype", draw.choice(_TYPES)),
                    lambda tensor=tensor: setattr(tensor, "name", draw.choice(_NAMES)),
                    lambda tensor=tensor: self._reshape(tensor),
                    lambda tensor=tensor: self._set(
                        tensor.parameters[draw.choice(_PARAMETERS)], self._value()
                    ),
                    lambda at=at: self._content(request, at),
                    lambda at=at: self._content(request, at),
                    lambda at=at: self._special(request, at),
                ]
            draw.choice(ways)()
        return request

    def _reshape(self, tensor: Any) -> None:
        draw = self._draw
        shape = list(tensor.shape)
        if shape and draw.random() < 0.7:
            shape[draw.randrange(len(shape))] = draw.choice(_NUMBERS)
        else:
            shape = [draw.choice(_NUMBERS) for _ in range(draw.randrange(9))]
        del tensor.shape[:]
        tensor.shape.extend(spared(shape))

    def _content(self, request: Any, at: int) -> None:
        if at < len(request.raw_input_contents):
            old = request.raw_input_contents[at]
            request.raw_input_contents[at] = self._draw.choice(
                [old[:-1], old + b"x", b"", self._draw.randbytes(len(old))]
            )

    def _special(self, request: Any, at: int) -> None:
        """NaN, infinite, and huge numbers; images that are none."""
        draw = self._draw
        if at >= len(request.raw_input_contents):
            return
        tensor = request.inputs[at]
        if tensor.name == "FRAMES" and draw.random() < 0.5:
            tensor.name, tensor.datatype = "FRAMES_ENCODED", "BYTES"
            del tensor.shape[:]
            tensor.shape.append(draw.choice([1, 2]))
            image = draw.choice([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a"])
            image += draw.randbytes(draw.randrange(200))
            length = draw.choice([len(image), 0, len(image) + 9, 2**32 - 1])
            request.raw_input_contents[at] = struct.pack("<I", length) + image
            return
        count = len(request.raw_input_contents[at]) // 4
        odd = [np.nan, np.inf, -np.inf, 1e38, 1e-45, -0.0]
        made = np.float32([draw.choice(odd) for _ in range(min(count, 1000))])
        request.raw_input_contents[at] = made.tobytes().ljust(4 * count, b"\0")

    def _value(self) -> Any:
        draw = self._draw
        return draw.choice(
            [
                draw.choice(_NUMBERS),
                draw.choice(_TEXTS),
                draw.random(),
                True,
                False,
                draw.random() * 9,
            ]
        )

    @staticmethod
    def _set(parameter: Any, value: Any) -> None:
        if isinstance(value, bool):
            parameter.bool_param = value
        elif isinstance(value, int):
            parameter.int64_param = value
        elif isinstance(value, float):
            parameter.double_param = value
        else:
            parameter.string_param = value

    # -- gRPC --------------------------------------------------------------------------------------

    def _grpc(self, request: Any) -> str:
        return self._call("ModelInfer", request.SerializeToString())

    def _grpc_bytes(self) -> str:
        data = self._damaged(self._valid().SerializeToString())
        return self._call("ModelInfer", data)

    def _grpc_other(self) -> str:
        """Calls that read only, with bytes or names that do not exist."""
        method = self._draw.choice(
            [
                "ModelConfig",
                "ModelMetadata",
                "ModelStatistics",
                "ModelReady",
                "ServerLive",
                "NoCall",
            ]
        )
        name = self._draw.choice(["world_model", *_TEXTS]).encode()
        request = b"\x0a" + bytes([min(len(name), 127)]) + name[:127]
        return self._call(method, self._draw.choice([request, self._draw.randbytes(30)]))

    def _call(self, method: str, data: bytes) -> str:
        call = self._channel.unary_unary(_METHOD + method)
        self.last = method.encode() + b" " + data
        try:
            call(data, timeout=_TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(f"{method}: {data[:200]!r}") from None
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return f"unavailable: {error.details()[:60]}"
            if error.code() is grpc.StatusCode.INTERNAL:
                return f"internal: {error.details()[:100]}"
            return "refused"
        return "answered"

    def _damaged(self, data: bytes) -> bytes:
        draw = self._draw
        made = bytearray(data)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(made) + 1) if draw.random() < 0.3 else draw.randrange(80)
            match draw.randrange(4):
                case 0:
                    made[at : at + 1] = draw.randbytes(1)
                case 1:
                    del made[at : at + draw.randrange(20)]
                case 2:
                    made[at:at] = draw.randbytes(draw.randrange(20))
                case 3:
                    del made[draw.randrange(len(made) + 1) :]
        return bytes(made) if draw.random() < 0.9 else draw.randbytes(draw.randrange(3000))

    # -- HTTP --------------------------------------------------------------------------------------

    def _as_http(self, request: Any) -> tuple[str, dict[str, Any], bytes]:
        """(path, JSON, binary part) of a request with raw contents."""
        inputs = []
        for tensor, data in zip(request.inputs, request.raw_input_contents, strict=False):
            item = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
            inputs.append({**item, "parameters": {"binary_data_size": len(data)}})
        parameters = {}
        for name, value in request.parameters.items():
            parameters[name] = getattr(value, value.WhichOneof("parameter_choice") or "bool_param")
        outputs = [
            {"name": output.name, "parameters": {"binary_data": True}} for output in request.outputs
        ]
        body = {"inputs": inputs, "outputs": outputs, "parameters": parameters}
        if not outputs:
            del body["outputs"]
            parameters["binary_data_output"] = True
        path = f"/v2/models/{request.model_name.replace(chr(0), '%00') or '%20'}/infer"
        return path, body, b"".join(request.raw_input_contents)

    def _http_spoilt(self) -> str:
        draw = self._draw
        path, body, data = self._as_http(self._spoilt(self._valid()))
        for _ in range(draw.randrange(3)):
            item: Any = body
            if draw.random() < 0.6 and body.get("inputs"):
                item = draw.choice(body["inputs"])
            key = draw.choice([*item, "extra", "data"])
            item[key] = draw.choice(
                [self._value(), None, [], {}, [[1.0, [2]]], {"a": {"b": []}}, [self._value()] * 3]
            )
            shape = item.get("shape")
            if isinstance(shape, list) and all(type(size) is int for size in shape):
                item["shape"] = spared(shape)
            if not isinstance(body.get("inputs"), list):
                break
            body["inputs"] = [each for each in body["inputs"] if isinstance(each, dict)]
        for item in body.get("inputs") if isinstance(body.get("inputs"), list) else ():
            spare(item)
        return self._post(path, body, data)

    def _http_bytes(self) -> str:
        """Bytes at the port itself: headers that lie, methods that do not exist, noise."""
        draw = self._draw
        path, body, data = self._as_http(self._valid())
        text = self._damaged(json.dumps(body).encode())
        length = draw.choice([len(text) + len(data), 0, 5, len(text)])
        announced = draw.choice([len(text), 0, -1, len(text) + 5, 2**31, 2**64])
        verb = draw.choice(["POST", "POST", "GET", "PUT", "X"])
        place = draw.choice([path, path, "/", "/v2", "/v2/" + "a" * 3000])
        head = (
            f"{verb} {place} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
            f"Inference-Header-Content-Length: {announced}\r\nConnection: close\r\n\r\n"
        ).encode()
        sent = head + text + data
        if draw.random() < 0.3:
            sent = self._damaged(sent)
        self.last = sent
        host, port = self._address.rsplit(":", 1)
        try:
            with socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as connection:
                connection.sendall(sent)
                connection.shutdown(socket.SHUT_WR)
                found = connection.recv(65536)
        except TimeoutError:
            raise TimeoutError(f"HTTP: {sent[:300]!r}") from None
        except OSError:
            return "hung up"
        return "refused" if found else "hung up"

    def _post(self, path: str, body: dict[str, Any], data: bytes) -> str:
        text = json.dumps(body).encode()
        self.last = path.encode() + b" " + text
        headers = {
            "Inference-Header-Content-Length": str(len(text)),
            "Content-Type": "application/octet-stream",
        }
        try:
            if self._http is None:
                self._http = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
            self._http.request("POST", path, text + data, headers)
            response = self._http.getresponse()
            found = response.read()
        except TimeoutError:
            raise TimeoutError(f"HTTP: {text[:300]!r}") from None
        except (OSError, http.client.HTTPException):
            if self._http is not None:
                self._http.close()
            self._http = None
            return "hung up"
        if response.status == 200:
            return "answered"
        return f"internal: {found[:100]!r}" if response.status == 500 else "refused"
