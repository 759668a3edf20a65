"""The model store: `~/.cache/weir/models/<name>/`, filled by `weir model prepare`, read by engines.

Law: importing it, `store` or `catalog` imports no torch; only `gguf`, which runs in a process of its own,
does.
"""
