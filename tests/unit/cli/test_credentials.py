"""`jigsaw credentials`: what it makes, what it never writes over, and what it says of bad input."""

from __future__ import annotations

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from jigsawrl.bus.credentials import open_to_others, read_credentials
from jigsawrl.cli.checks.credentials import check_credentials
from jigsawrl.cli.credentials import groups_of, make
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.main import main
from jigsawrl.contract.access import ACCESS


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificates(path.read_bytes())[0]


def hosts(path: Path) -> list[str]:
    names = certificate(path).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def jigsaw(*arguments: str | Path) -> int:
    return main(["credentials", *(str(argument) for argument in arguments)])


def test_a_group_has_a_file_per_role_that_only_its_owner_reads(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    assert jigsaw(folder, "--days", "30") == 0
    assert sorted(path.stem for path in (folder / "default").iterdir()) == sorted(ACCESS)
    for role in ACCESS:
        found = read_credentials(folder, role)
        assert (found.role, found.group) == (role, "default")
        days = (found.valid_until - datetime.now(UTC)) / timedelta(days=1)
        assert 29.9 < days <= 30
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) in (0o600, 0o700), path


def test_a_roles_certificate_is_no_servers(tmp_path: Path) -> None:
    make(tmp_path, group="red")
    role = certificate(tmp_path / "red" / "rollout.pem")
    usage = role.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not role.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_server_is_named_by_its_hosts_and_this_machine(tmp_path: Path) -> None:
    jigsaw(tmp_path, "--hosts", "gpu-1.example.org, 10.0.0.7")
    assert hosts(tmp_path / "server.pem") == [
        "localhost",
        "127.0.0.1",
        "::1",
        "gpu-1.example.org",
        "10.0.0.7",
    ]


def test_nothing_that_exists_is_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, group="red")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*") if path.suffix != ".conf"}
    assert jigsaw(tmp_path, "--group", "red") == 2
    assert "--renew makes its files again" in capsys.readouterr().err
    assert jigsaw(tmp_path, "--group", "blue") == 0
    assert groups_of(tmp_path) == ["blue", "red"]
    assert {path: path.read_bytes() for path in before} == before
    text = (tmp_path / "nats-server.conf").read_text()
    assert '"red" {' in text
    assert '"blue" {' in text


def test_renewing_keeps_the_authority_and_the_hosts_and_renews_all_groups(tmp_path: Path) -> None:
    make(tmp_path, group="red", hosts=("a.example",), days=2)
    make(tmp_path, group="blue", days=2)
    authority = (tmp_path / "ca.pem").read_bytes()
    make(tmp_path, group="red", renew=True, days=100)
    assert (tmp_path / "ca.pem").read_bytes() == authority
    assert "a.example" in hosts(tmp_path / "server.pem")
    for group in ("red", "blue"):
        until = read_credentials(tmp_path / group, "node").valid_until
        assert until > datetime.now(UTC) + timedelta(days=99)
    make(tmp_path, group="red", renew=True, hosts=("b.example",))
    assert "b.example" in hosts(tmp_path / "server.pem")
    assert "a.example" not in hosts(tmp_path / "server.pem")


@pytest.mark.parametrize("content", ["", "{", '{"hosts": 1}'])
def test_a_list_of_servers_that_can_not_be_read_is_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, group="red")
    (tmp_path / "servers.json").write_text(content)
    assert jigsaw(tmp_path, "--group", "blue") == 2
    error = capsys.readouterr().err
    assert "servers.json can't be read" in error
    assert error.count("\n") == 1
    (tmp_path / "servers.json").unlink()
    assert jigsaw(tmp_path, "--renew", "--hosts", "a.example") == 0


def test_a_server_that_was_made_by_half_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (folder / ".server.key.part").mkdir(parents=True)  # the key can't be written
    with pytest.raises(CommandError, match="can't write"):
        make(folder, group="red", hosts=("a.example",))
    assert (folder / "server.pem").exists()
    assert not (folder / "server.key").exists()
    (folder / ".server.key.part").rmdir()
    make(folder, group="red")
    assert "a.example" in hosts(folder / "server.pem")


def test_nothing_outlives_the_authority(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    make(tmp_path, group="red", now=now - timedelta(days=3640))
    make(tmp_path, group="blue", days=365)
    assert read_credentials(tmp_path / "blue", "node").valid_until < now + timedelta(days=11)
    with pytest.raises(CommandError, match=r"the authority in .* has expired"):
        make(tmp_path, group="green", now=now + timedelta(days=20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--group", "a.b"], "--group 'a.b' must be"),
        (["--days", "0"], "--days 0"),
        (["--hosts", "a b"], "'a b' is no name"),
        (["--hosts", "host:4222"], "'host:4222' is no name"),
        (["--cluster", "a,b"], "a cluster is three servers, or five"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_made(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert jigsaw(tmp_path / "made", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "made").exists()


def test_what_was_made_is_told_with_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, group="red")
    here = capsys.readouterr().out
    assert "for other machines: --hosts NAME" in here
    assert f"jigsaw up --listen HOST:4222 --credentials {tmp_path}" in here
    make(tmp_path, group="red", hosts=("a.example",), renew=True)
    there = capsys.readouterr().out
    assert "a.example" in there
    assert "for other machines" not in there


def test_an_authority_without_its_key_signs_nothing(tmp_path: Path) -> None:
    make(tmp_path, group="red")
    (tmp_path / "ca.key").unlink()
    with pytest.raises(CommandError, match="nothing can be signed without it"):
        make(tmp_path, group="blue")


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("0.0.0.0", "others can reach that address"),
        ("10.0.0.7:4222", "others can reach that address"),
        ("[::]:4222", "others can reach that address"),
        ("gpu-1", "others can reach that address"),
        ("127.0.0.1:port", "give HOST or HOST:PORT"),
        ("127.0.0.1:70000", "give HOST or HOST:PORT"),
    ],
)
def test_a_daemon_that_others_could_reach_is_refused_without_credentials(
    listen: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "daemon"
    assert main(["up", "--folder", str(folder), "--listen", listen]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not folder.exists()


def test_a_daemon_needs_the_servers_certificate_and_one_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    up = ["up", "--folder", str(tmp_path / "daemon"), "--credentials"]
    assert main([*up, str(tmp_path / "none" / "red")]) == 2
    assert "holds no ca.pem" in capsys.readouterr().err
    make(tmp_path, group="red")
    make(tmp_path, group="blue")
    assert main([*up, str(tmp_path)]) == 2
    assert "its groups are blue, red" in capsys.readouterr().err
    assert main([*up, str(tmp_path / "red"), "--sync-interval", "soon"]) == 2
    assert "give always, or a time" in capsys.readouterr().err


def test_a_daemon_is_refused_with_credentials_that_can_not_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "old", group="red", days=1, now=datetime.now(UTC) - timedelta(days=2))
    make(tmp_path / "new", group="red")
    up = ["up", "--detach", "--folder", str(tmp_path / "daemon"), "--credentials"]
    for given, reason in (("old/red", "have expired"), ("new/blue", "can't be read")):
        assert main([*up, str(tmp_path / given)]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
    (tmp_path / "new" / "red" / "node.pem").unlink()
    assert main([*up, str(tmp_path / "new" / "red")]) == 2
    assert "node.pem can't be read" in capsys.readouterr().err
    assert not (tmp_path / "daemon").exists()


def test_doctor_names_keys_that_others_can_read_and_what_ends_soon(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    make(tmp_path, group="red", days=30, now=now)
    (finding,) = check_credentials(tmp_path / "red", now=now)
    assert finding.state == "ok"
    assert [*check_credentials(tmp_path, now=now)] == [finding]
    for name in ("red/node.pem", "server.key"):
        (tmp_path / name).chmod(0o644)
        assert name in (open_to_others(tmp_path / name) or "")
    told = [*check_credentials(tmp_path / "red", now=now)]
    assert [(x.state, "mode 644" in x.found) for x in told] == [("warning", True)] * 2
    (one,) = check_credentials(tmp_path / "red" / "client.pem", now=now + timedelta(days=20))
    assert (one.state, "expire in" in one.found) == ("warning", True)
    late = [*check_credentials(tmp_path / "red", now=now + timedelta(days=31))]
    assert any(x.state == "failed" and "server.pem has expired" in x.found for x in late)
    (none,) = check_credentials(tmp_path / "blue", now=now)
    assert none.state == "failed"
