"""paged_attention for Mosaic TPU. Importing it loads no Mosaic; `mosaic_tpu` does."""
