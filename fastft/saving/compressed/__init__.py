"""Compressed checkpoints for serving: FP8, INT8, INT4, NVFP4 and MXFP4, made by llm-compressor and checked here."""
