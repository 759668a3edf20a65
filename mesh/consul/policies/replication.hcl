# Servers of secondary datacenters: copy policies, tokens and intentions from the primary. Token secrets can only be
# read with acl write, so this one is worth as much as the management token: only servers may hold it.

acl = "write"

operator = "write"

service_prefix "" {
  policy     = "read"
  intentions = "read"
}
