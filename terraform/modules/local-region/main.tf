# One region of the local world: real processes on loopback, started and stopped by weir.
#
# Terraform keeps no eye on processes, so the module gives it one. `weir region up` leaves its facts in
# region.json and its supervisor's process id in supervisor.lock; create leaves a random mark beside
# them. While the supervisor lives, the mark on disk is the one in the state: no change. When it is
# gone (weir down, a crash, a reboot), there is no mark to agree with, and plan replaces the region.

locals {
  folder = "${var.world}/regions/${var.region.name}"
  facts  = "${local.folder}/region.json"
  mark   = "${var.world}/terraform/${var.region.name}.mark"

  # A process id may have been given to somebody else since: the command line must name our region.
  # Without /proc there is no telling, and a region that may be alive is not to be torn down.
  _pid     = try(regex("[0-9]+", file("${local.folder}/supervisor.lock")), "0")
  _has_pid = try(strcontains(file("/proc/${local._pid}/cmdline"), var.region.name), false)
  running  = fileexists(local.facts) && (local._has_pid || !fileexists("/proc/self/cmdline"))
}

resource "terraform_data" "region" {
  # Where the region stands can't be changed in place; what it is started with can.
  triggers_replace = {
    mark  = local.running && fileexists(local.mark) ? file(local.mark) : uuid()
    name  = var.region.name
    world = var.world
  }

  # A destroy provisioner may look at self only, so all that it needs is kept here.
  input = {
    command = var.weir_command
    facts   = local.facts
    home    = var.home
    mark    = local.mark
    name    = var.region.name
    world   = var.world
  }

  lifecycle {
    precondition {
      condition     = !strcontains(var.weir_command, "/") || fileexists(var.weir_command)
      error_message = "${var.weir_command} is not there. Run `make setup` at the top of the repository, or set weir_command."
    }
  }

  # Started without a shell: an interpreter that is the command itself takes names and paths as they are.
  provisioner "local-exec" {
    interpreter = [self.input.command, "region", "up", self.input.name, "--world"]
    command     = self.input.world
    working_dir = self.input.home
  }

  provisioner "local-exec" {
    interpreter = ["/bin/sh", "-c"]
    command     = "mkdir -p \"$(dirname \"$FILE\")\" && printf %s \"$MARK\" > \"$FILE\""
    environment = {
      FILE = self.input.mark
      MARK = self.triggers_replace.mark
    }
  }

  provisioner "local-exec" {
    when        = destroy
    interpreter = [self.input.command, "region", "down", self.input.name, "--world"]
    command     = self.input.world
    working_dir = self.input.home
  }
}

locals {
  # The path comes from the resource's output, which is unknown until the region is up. So the file is
  # read after it was written, and never before.
  known = try(jsondecode(file(terraform_data.region.output.facts)), null)
}
