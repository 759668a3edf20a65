variable "home" {
  description = "Folder that weir is started in, absolute: the top of the repository, with its regions/, services/ and intentions/."
  nullable    = false
  type        = string

  validation {
    condition     = startswith(var.home, "/")
    error_message = "home: must be an absolute path."
  }
}

variable "region" {
  description = "The region's row, as regions/<name>.yaml has it (fields not named here may be there)."
  nullable    = false

  type = object({
    cloud    = string
    failover = list(string)
    name     = string
    weight   = number
    zones    = list(string)
  })

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,38}[a-z0-9]$", var.region.name))
    error_message = "name: a region is called by small letters, digits and '-', at most 40 of them; it becomes the name of a Consul datacenter."
  }

  validation {
    condition     = contains(["aws", "azure", "local"], var.region.cloud)
    error_message = "cloud: must be aws, azure or local."
  }

  validation {
    condition     = length(var.region.zones) > 0 && length(distinct(var.region.zones)) == length(var.region.zones)
    error_message = "zones: must name at least one zone, and none twice."
  }

  validation {
    condition     = var.region.weight >= 0
    error_message = "weight: must be 0 or more."
  }

  validation {
    condition     = !contains(var.region.failover, var.region.name)
    error_message = "failover: a region can't take over from itself."
  }
}

variable "weir_command" {
  description = "The weir command: a path, or a name on PATH."
  nullable    = false
  type        = string

  validation {
    condition     = trimspace(var.weir_command) != "" && (startswith(var.weir_command, "/") || !strcontains(var.weir_command, "/"))
    error_message = "weir_command: must be an absolute path or a name on PATH: weir is started in another folder than Terraform."
  }
}

variable "world" {
  description = "Folder of the world the region joins, absolute. Regions of one folder make one mesh."
  nullable    = false
  type        = string

  validation {
    condition     = startswith(var.world, "/")
    error_message = "world: must be an absolute path, since destroy may run from another folder than apply."
  }
}
