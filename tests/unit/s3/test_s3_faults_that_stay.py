"""What no retry can mend ends at once and says what to check; credentials that the chain renews are renewed."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from s3_content import FAST, LARGE, SMALL, TUNING

from headframe_api.errors import ConfigError, HeadframeError, TemporaryError
from headframe_api.spec import S3Spec
from headframe_worker.stores.s3.store import S3Store
from testbed.faulty_proxy import FaultyProxy, operation
from testbed.s3 import S3Server


@pytest.mark.parametrize(
    ("answer", "reason", "advice"),
    [
        ((403, "AccessDenied"), "AccessDenied", "s3:PutObject"),
        ((403, "InvalidAccessKeyId"), "BadCredentials", "AWS_ACCESS_KEY_ID"),
        ((403, "SignatureDoesNotMatch"), "BadCredentials", "AWS_SECRET_ACCESS_KEY"),
        ((400, "ExpiredToken"), "ExpiredCredentials", "new credentials"),
        ((404, "NoSuchBucket"), "NoSuchBucket", "bucket"),
        ((400, "InvalidStorageClass"), "StoreRefused", "spec.s3"),
    ],
)
def test_what_stays_wrong_ends_at_once_and_says_what_to_check(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, answer: tuple[int, str], reason: str, advice: str
) -> None:
    proxy.inject(operation("PutObject"), times=99, answer=answer)
    with pytest.raises(ConfigError) as caught:
        proxied.write("k", [SMALL])
    text = str(caught.value)
    assert caught.value.reason == reason
    assert proxy.requests["PutObject"] == 1
    for part in (f"{proxied.uri}/k", "PutObject", answer[1], f"****{s3_server.access_key[-4:]} (from env)", advice):
        assert part in text
    assert s3_server.access_key not in text
    assert s3_server.secret_key not in text


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_credentials_that_the_real_server_refuses_are_found_before_anything_is_written(
    s3_server: S3Server, uri: str, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "not-what-the-server-knows")
    store = S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    for attempt in (store.check_writable, lambda: list(store.list())):
        with pytest.raises(ConfigError, match=f"{uri}.* was refused: .*; check AWS_ACCESS_KEY_ID") as caught:
            attempt()
        assert caught.value.reason == "BadCredentials"
        assert "not-what-the-server-knows" not in caught.value.message


def test_a_wrong_region_is_put_right_by_the_server_that_names_its_own(s3_server: S3Server, uri: str) -> None:
    store = S3Store(uri, S3Spec(endpoint=s3_server.endpoint, region="eu-west-7"), tuning=TUNING)
    assert store.write("k", [LARGE], exclusive=True).created
    assert store.read("k") == LARGE


def test_a_wrong_clock_is_explained(proxied: S3Store, proxy: FaultyProxy) -> None:
    headers = {"Date": "Tue, 01 Jan 2030 00:00:00 GMT"}
    proxy.inject(operation("PutObject"), times=99, answer=(403, "RequestTimeTooSkewed"), headers=headers)
    with pytest.raises(TemporaryError, match=r"clock is \d+ s behind the server's"):
        proxied.write("k", [SMALL])


def test_a_bucket_that_is_missing_or_forbidden_is_found_before_anything_is_written(s3_server: S3Server) -> None:
    store = S3Store("s3://there-is-no-such-bucket/x", S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    with pytest.raises(ConfigError, match="create there-is-no-such-bucket"):
        store.check_writable()
    with pytest.raises(ConfigError, match="create there-is-no-such-bucket"):
        list(store.list())


def test_no_credentials_at_all_say_where_they_may_come_from(
    s3_server: S3Server, uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    store = S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=TUNING)
    with pytest.raises(ConfigError, match="no credentials; provide credentials") as caught:
        store.check_writable()
    assert caught.value.reason == "NoCredentials"


def test_tls_to_a_port_without_it_and_a_profile_that_is_not_there_are_named(
    s3_server: S3Server, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = s3_server.endpoint.replace("http://", "https://")
    with pytest.raises(ConfigError, match="speaks no TLS there: use http://") as caught:
        S3Store(uri, S3Spec(endpoint=endpoint), tuning=TUNING).check_writable()
    assert caught.value.reason == "NoTls"
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"\(nobody\) could not be found; check AWS_PROFILE"):
        S3Store(uri, S3Spec(endpoint=s3_server.endpoint), tuning=TUNING).check_writable()


def test_a_host_that_does_not_exist_is_not_waited_for_long(uri: str) -> None:
    policy = replace(FAST, budget_seconds=600, unknown_host_seconds=0.2)
    store = S3Store(uri, S3Spec(endpoint="http://no-such-host.invalid"), tuning=replace(TUNING, retry=policy))
    with pytest.raises(TemporaryError, match=r"no-such-host\.invalid") as caught:
        store.check_writable()
    assert "AWS was asked" not in caught.value.message


def test_who_forgot_the_endpoint_is_told_that_aws_was_asked(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = replace(FAST, budget_seconds=600, unknown_host_seconds=0.2)
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(variable, raising=False)
    # No such region, so that its host is unknown wherever this runs.
    store = S3Store(uri, S3Spec(region="xx-nowhere-1"), tuning=replace(TUNING, retry=policy))
    with pytest.raises(TemporaryError, match=r"no endpoint is set, so AWS was asked: set spec\.s3\.endpoint"):
        store.check_writable()


def test_expired_credentials_that_refresh_go_on(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    proxied.write("before", [SMALL])
    # The secret in the file is rotated, as a mounted Secret is; the one in memory has expired.
    credentials = tmp_path / "credentials"
    lines = ["[default]", f"aws_access_key_id={s3_server.access_key}", f"aws_secret_access_key={s3_server.secret_key}"]
    credentials.write_text("\n".join([*lines, "aws_session_token=second"]))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    proxy.inject(
        lambda request: "x-amz-security-token" not in request.headers, times=10**6, answer=(400, "ExpiredToken")
    )
    proxy.without_headers = ("x-amz-security-token",)
    assert proxied.write("k", [LARGE], exclusive=True).created
    assert proxied.read("k") == LARGE


def test_a_credential_process_is_asked_again_when_the_server_says_expired(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    script = tmp_path / "credentials.sh"
    keys = f'"AccessKeyId": "{s3_server.access_key}", "SecretAccessKey": "{s3_server.secret_key}"'
    script.write_text(
        f"#!/bin/sh\necho x >> {calls}\n"
        f"""echo '{{"Version": 1, {keys}, "Expiration": "2099-01-01T00:00:00Z", "SessionToken": "'$(wc -l < {calls})'"}}'\n"""
    )
    script.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[default]\ncredential_process = {script}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    proxy.without_headers = ("x-amz-security-token",)
    store = S3Store(proxied.uri, S3Spec(endpoint=proxy.endpoint), tuning=TUNING)
    store.check_writable()
    asked = len(calls.read_text().split())
    proxy.inject(
        lambda request: int(request.headers["x-amz-security-token"]) <= asked, times=10**6, answer=(403, "ExpiredToken")
    )
    assert store.write("k", [LARGE], exclusive=True).created
    assert len(calls.read_text().split()) == asked + 1
    assert store.read("k") == LARGE
    store.close()


def test_no_error_and_no_log_line_holds_a_secret(
    proxied: S3Store, proxy: FaultyProxy, s3_server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    secrets_known = (s3_server.access_key, s3_server.secret_key)
    texts = []
    for status, code in ((403, "AccessDenied"), (403, s3_server.secret_key), (503, f"SlowDown {s3_server.access_key}")):
        proxy.inject(operation("PutObject", "ListObjectsV2"), times=2, answer=(status, code))
        for attempt in (lambda: proxied.write("k", [SMALL]), lambda: list(proxied.list())):
            try:
                attempt()
            except HeadframeError as error:
                texts.append(f"{error} {error!r}")
    assert len(texts) == 4
    text = "\n".join([*texts, caplog.text, repr(proxied), repr(vars(proxied))])
    assert not [secret for secret in secrets_known if secret in text]
