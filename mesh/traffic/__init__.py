"""What the KV values mean, who wins between regions, and how a change is asked for safely.

Law: values, slots, plan, epochs and safety are pure; manager.py and cli.py are the shell. Knows no Envoy.
"""
