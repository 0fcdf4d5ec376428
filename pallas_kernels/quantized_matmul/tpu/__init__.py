"""quantized_matmul for Mosaic TPU: codes cross HBM as they are kept and are decoded in VMEM."""
