"""Real vLLM as a child of the executor: its virtual environment, its process, its sleep, its metrics.

Law: nothing of vLLM is imported here; it is spoken to over loopback HTTP alone.
"""
