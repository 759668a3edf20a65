"""A client of OpenAI-compatible servers: `vllm serve`, `trtllm-serve`, `llama-server`, our own executor.

Law: what goes over the wire is decided in pure files (request, answer, sse, verdict); client.py alone does
I/O.
"""
