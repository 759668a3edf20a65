"""The region room: what a region is, as data, and what every command line shares.

Law: the leftmost room. It imports nothing of the house; everybody may import it.
One YAML file per region stands beside this file and is read by Python and by Terraform alike.
"""
