"""KV cache accounting (S12): how many bytes a sequence holds, and what fits.

Law: pure except cli.py and models.py; nothing here imports torch. shape: bytes and blocks, the rule that
engines allocate by and the scheduler admits by. plan: what fits and where it stops fitting. published: shapes
of well-known models, for planning without their weights.
"""
