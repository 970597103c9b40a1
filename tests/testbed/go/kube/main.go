// Command kube is a whole Kubernetes in one program: it plays the component that it is called as (through a link of that
// name), or that its first argument names. One program because the components share most of their code: they build and
// link once, in minutes rather than an hour.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	if name == "kube" && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	if name == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command, err := component(name)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	os.Exit(cli.Run(command))
}

func component(name string) (*cobra.Command, error) {
	switch name {
	case "kube-apiserver":
		return apiserver.NewAPIServerCommand(), nil
	case "kube-controller-manager":
		return controllermanager.NewControllerManagerCommand(), nil
	case "kube-scheduler":
		return scheduler.NewSchedulerCommand(), nil
	case "kube-proxy":
		return proxy.NewProxyCommand(), nil
	case "kubelet":
		return kubelet.NewKubeletCommand(context.Background()), nil
	case "kubectl":
		return kubectl.NewDefaultKubectlCommand(), nil
	}
	return nil, fmt.Errorf("kube: unknown component %q", name)
}
