"""Counts the kernels of a captured CUDA graph through the driver."""

from __future__ import annotations

import ctypes

import torch

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL


def kernel_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Count the kernel nodes of a graph captured with `keep_graph=True`."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kernels = 0
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kernels += kind.value == _KERNEL
    return kernels
