# The control plane of a region: sees the whole catalog of all regions, writes what is applied, carries traffic
# changes between regions. It may not touch audit, locks, drills, intentions or ACLs.
# control-plane.each-service.hcl comes once for each service that it serves.

node_prefix "" { policy = "read" }

agent_prefix "" { policy = "read" }

service_prefix "" {
  policy     = "read"
  intentions = "read"
}

# Reading a leaf certificate takes write on the service's name.
service "ingress-gateway" { policy = "write" }

service "mesh-gateway" { policy = "write" }

key_prefix "config/traffic/" { policy = "write" }

key_prefix "status/" { policy = "write" }
