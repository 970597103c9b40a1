// Pins Grafana's own schema of dashboards, as Go types; see ../../tools.py.
module headframe.dev/testbed/grafana-schema

go 1.25.0

require github.com/grafana/grafana-foundation-sdk/go v0.0.22
