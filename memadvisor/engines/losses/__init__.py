"""The product before a loss in chunks of rows: chunked_tensor.py."""
