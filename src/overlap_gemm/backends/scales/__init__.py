"""8-bit operands with scales: layouts for TMA, products by torch, quantization of rows."""
