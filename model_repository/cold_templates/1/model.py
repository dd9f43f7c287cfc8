from worldserve.triton import TritonColdTemplates as TritonPythonModel

__all__ = ["TritonPythonModel"]
