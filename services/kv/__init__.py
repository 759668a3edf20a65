"""KV cache accounting (S12): how many bytes a sequence holds, what fits, who holds how much right now.

Law: pure except cli.py; nothing here imports torch. shape: bytes. plan: what fits and where it stops
fitting. ledger: who holds what on a running engine, and whether one more may come in. published: shapes of
well-known models, for planning without their weights.
"""
