"""Quality and speed of non-prefix reuse on a real model: `python -m bench.reuse`."""
