# Whoever registers a region's mesh gateway.

service "mesh-gateway" {
  policy     = "write"
  intentions = "deny"
}

node_prefix "" { policy = "read" }

agent_prefix "" { policy = "read" }
