from worldserve.triton import TritonWorldModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
