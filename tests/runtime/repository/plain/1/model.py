"""Adds one."""

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb.get_input_tensor_by_name(request, "X").as_numpy()
        return pb.InferenceResponse([pb.Tensor("X1", (x + 1).astype(np.float32))])
