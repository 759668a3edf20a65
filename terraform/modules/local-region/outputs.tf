output "ca_file" {
  description = "Certificates to trust when calling the ingress."
  value       = try(local.known.ca_file, null)
}

output "consul" {
  description = "Address of the region's Consul: HTTP API and UI."
  value       = try(local.known.consul, null)
}

output "ingress" {
  description = "Address of the region's ingress gateway."
  value       = try(local.known.ingress, null)
}

output "name" {
  description = "Name of the region, also the name of its Consul datacenter."
  value       = var.region.name
}
