"""Reductions within a step: operations, all-reduce, quantized codecs."""
