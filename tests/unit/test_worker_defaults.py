"""The cluster's defaults fill what spec.worker leaves empty, and never what it says."""

from headframe_api.spec import ExtractionJobSpec
from headframe_operator.settings import read_settings
from headframe_operator.worker_defaults import with_worker_defaults

DEFAULTS = '{"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}], "nodeSelector": {"pool": "gpu"}}'
BASE = {"model": {"source": "org/model"}, "dataset": {"source": "org/data"}, "output": {"uri": "s3://b/p"}}


def test_a_field_is_taken_whole_or_not() -> None:
    settings = read_settings({"HEADFRAME_OPERATOR_WORKER_DEFAULTS": DEFAULTS})
    spec = ExtractionJobSpec.model_validate(BASE | {"worker": {"nodeSelector": {"zone": "a"}, "image": "mine:1"}})
    worker = with_worker_defaults(spec, settings.worker_defaults).worker
    assert worker.tolerations == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert worker.node_selector == {"zone": "a"}
    assert worker.image == "mine:1"
