"""Devices that instances run on: GPUs and their MIG slices over NVML, the CPU, and seeded fakes.

All stand behind one small door (door.py); `devices()` gives the right one of this machine.
"""
