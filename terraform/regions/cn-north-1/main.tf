# One region. This folder's name is the region's name; its facts are the row regions/<name>.yaml.
# All roots are alike: a new region is a new row and a copy of this folder under its name.

locals {
  name = basename(abspath(path.root))
  top  = abspath("${path.root}/../../..")
  row  = yamldecode(file("${local.top}/regions/${local.name}.yaml"))
}

# Checked before anything is made. The row's shape is checked by the module.
resource "terraform_data" "row" {
  input = local.name

  lifecycle {
    precondition {
      condition     = local.row.name == local.name
      error_message = "regions/${local.name}.yaml: name is ${local.row.name}, but the file and this folder are called ${local.name}."
    }

    precondition {
      condition = alltrue([
        for other in local.row.failover : fileexists("${local.top}/regions/${other}.yaml")
      ])
      error_message = "regions/${local.name}.yaml: failover names a region that has no row in regions/."
    }
  }
}

module "region" {
  source = "../../modules/local-region"
  count  = var.kind == "local" ? 1 : 0

  home         = local.top
  region       = local.row
  weir_command = coalesce(var.weir_command, "${local.top}/.venv/bin/weir")
  world        = abspath(coalesce(var.world, "${local.top}/.weir"))

  depends_on = [terraform_data.row]
}
