service "${service}" {
  policy     = "write"
  intentions = "read"
}
