// Judges dashboards by Grafana's own schema: no field unknown, none of a wrong type, no required one missing, no value out of
// bounds, down to the options of each kind of panel and the queries of its data source.
package main

import (
	"fmt"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func main() {
	plugins.RegisterDefaultPlugins()
	failed := false
	for _, file := range os.Args[1:] {
		if err := judge(file); err != nil {
			failed = true
			fmt.Fprintf(os.Stderr, "%s: %v\n", file, err)
		}
	}
	if failed {
		os.Exit(1)
	}
}

func judge(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var read dashboard.Dashboard
	err = read.UnmarshalJSONStrict(text)
	if problems, ok := err.(cog.BuildErrors); ok && len(problems) == 0 { // not nil when all is well
		err = nil
	}
	if err != nil {
		return err
	}
	return read.Validate()
}
