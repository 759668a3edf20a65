variable "kind" {
  default     = "local"
  description = "Where the region runs: local is real processes on this machine's loopback addresses."
  nullable    = false
  type        = string

  validation {
    condition     = contains(["local", "aws", "azure"], var.kind)
    error_message = "kind: must be local (aws and azure come later)."
  }

  validation {
    condition     = !contains(["aws", "azure"], var.kind)
    error_message = "kind: aws and azure come with a later release; until then regions run on this machine: kind = \"local\"."
  }
}

variable "weir_command" {
  default     = null
  description = "The weir command: a path, or a name on PATH. Default: the one that `make setup` puts into .venv."
  type        = string
}

variable "world" {
  default     = null
  description = "Folder of the world the region joins. Default: .weir at the top of the repository, where `weir up` has it."
  type        = string
}
