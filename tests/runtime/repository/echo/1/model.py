"""Doubles X and tells about its process; request parameters make it hang, raise or refuse."""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb

from worldserve.shutdown import StopWatch


class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.parameters = {k: v["string_value"] for k, v in config["parameters"].items()}
        if self.parameters.get("fail_to_load") == "true":
            raise RuntimeError("told to fail while loading")
        time.sleep(float(self.parameters.get("load_s", 0)))
        self.stop_watch = StopWatch(self.flush)

    def flush(self):
        if "flush_file" in self.parameters:
            Path(self.parameters["flush_file"]).write_text("flushed")

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        told = json.loads(request.parameters() or "{}")
        time.sleep(float(told.get("sleep_s", 0)))
        if told.get("refuse"):
            error = pb.TritonError("told to refuse", pb.TritonError.INVALID_ARG)
            return pb.InferenceResponse(error=error)
        if told.get("raise"):
            raise RuntimeError("told to raise")
        x = pb.get_input_tensor_by_name(request, "X").as_numpy()
        about = {
            "pid": os.getpid(),
            "prefix": sys.prefix,
            "numpy": np.__version__,
            "parameters": self.parameters,
            "environment": dict(os.environ),
        }
        return pb.InferenceResponse(
            [
                pb.Tensor("Y", (2 * x).astype(np.float32)),
                pb.Tensor("ABOUT", np.array([json.dumps(about).encode()], np.object_)),
            ]
        )

    def finalize(self):
        self.stop_watch.close()
