"""quantized_matmul for Mosaic GPU, on Hopper. Importing it loads no Mosaic; `mosaic_gpu` does."""
