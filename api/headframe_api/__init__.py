"""The contract of Headframe: what a manifest says, what lies on disk, what a pod reports. Depends on pydantic alone."""
