# Whoever registers a region's ingress gateway.

service "ingress-gateway" {
  policy     = "write"
  intentions = "deny"
}

node_prefix "" { policy = "read" }

agent_prefix "" { policy = "read" }
