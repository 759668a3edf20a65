"""Terraform: the files' shape, and real Terraform runs on a copy of them."""
