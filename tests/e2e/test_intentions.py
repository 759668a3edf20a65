"""Who may call whom, on the real sidecars: default deny, across regions, changed while connections are open.

Law: a stranger of the mesh (a real Connect leaf of a service without rights) knocks at sidecars and mesh
gateways from outside Envoy. The shipped catalog is back in force after each test.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from intentions.load import default_file
from mesh.world.addresses import MESH_GATEWAY, SIDECAR
from mesh.world.runner import weir_command
from mesh.xds import names
from tests.e2e.mesh_world import REPO, MeshWorld, Result, failures

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

STRANGER, CLIENT = "stranger", "ingress-gateway"
MODELS = "/v1/models"
HERE, THERE = "us-east-1", "cn-north-1"
DENIED = re.compile(r"denied: (\d+)$", re.MULTILINE)


@pytest.fixture
def shipped(calm: MeshWorld) -> Iterator[MeshWorld]:
    """The world with the shipped intentions, before and after."""
    _apply(calm, default_file())
    yield calm
    _apply(calm, default_file())
    for region in calm.names:
        with _Caller(calm, region, CLIENT) as client, _Caller(calm, region, STRANGER) as stranger:
            calm.until(f"{region}: as shipped", partial(_answers, {200}, client))
            calm.until(f"{region}: as shipped", partial(_answers, {403}, stranger))


def _intentions(world: MeshWorld, *args: str, region: str = "") -> Result:
    """`weir intentions …` with the agent of a region (the primary)."""
    agent = world.world.address(region or world.world.regions.primary.name).consul_http
    done = subprocess.run(
        [*weir_command(), "intentions", *args, "--consul", agent],
        cwd=REPO,
        env={**os.environ, "CONSUL_HTTP_TOKEN": world.world.token},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def _apply(world: MeshWorld, catalog: Path) -> None:
    done = _intentions(world, "apply", "--yes", "--dir", str(catalog.parent))
    assert done.code == 0, done.err


def _catalog(folder: Path, *rows: tuple[str, str, str]) -> Path:
    """A catalog of its own: (source, destination, action)."""
    body = {"intentions": [{"source": s, "destination": d, "action": a} for s, d, a in rows]}
    path = folder / "catalog.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return path


class _Caller:
    """One kept-alive mTLS connection with the leaf that `source`'s agent gives to `service`.

    to: a region whose mesh gateway is called instead of the own region's sidecar.
    """

    def __init__(self, world: MeshWorld, region: str, service: str, to: str = "") -> None:
        self._context = _context(world, region, service)
        where = world.world.address(to or region)
        if to:
            trust_domain = _json(world, region, "/v1/agent/connect/ca/roots")["TrustDomain"]
            self._at = (where.mesh_gateway, MESH_GATEWAY)
            self._name = names.sni("chat", "stable", to, trust_domain)
        else:
            self._at, self._name = (where.instance(0), SIDECAR), ""
        self._line: http.client.HTTPConnection | None = None
        self.colour = ""

    def __enter__(self) -> _Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def get(self, path: str = MODELS) -> int:
        """Status of a request over the connection, which is opened when there is none."""
        if self._line is None:
            self._line = _Line(self._at, self._context, self._name)
        self._line.request("GET", path)
        answer = self._line.getresponse()
        answer.read()
        self.colour = answer.headers.get(names.METADATA_HEADER, "")
        return answer.status

    @property
    def port(self) -> int:
        """Own port of the open connection: the same port means that it is still the same connection."""
        assert self._line is not None
        assert self._line.sock is not None
        return int(self._line.sock.getsockname()[1])


class _Line(http.client.HTTPSConnection):
    """HTTP/1.1 over TLS with an SNI of its own."""

    def __init__(self, at: tuple[str, int], context: ssl.SSLContext, name: str) -> None:
        super().__init__(*at, timeout=10, context=context)
        self._tls, self._name = context, name

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)
        assert self.sock is not None
        self.sock = self._tls.wrap_socket(self.sock, server_hostname=self._name or None)


def _context(world: MeshWorld, region: str, service: str) -> ssl.SSLContext:
    """Trusts the mesh alone, shows the leaf of `service`."""
    roots = _json(world, region, "/v1/agent/connect/ca/roots")["Roots"]
    leaf = _json(world, region, f"/v1/agent/connect/ca/leaf/{service}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # Connect certificates carry a SPIFFE id and no host
    context.load_verify_locations(cadata="\n".join(root["RootCert"] for root in roots))
    folder = world.folder.parent / "leafs"
    folder.mkdir(mode=0o700, exist_ok=True)
    chain, key = folder / f"{region}-{service}.pem", folder / f"{region}-{service}.key"
    chain.write_text(leaf["CertPEM"], encoding="utf-8")
    key.touch(mode=0o600)
    key.write_text(leaf["PrivateKeyPEM"], encoding="utf-8")
    context.load_cert_chain(chain, key)
    return context


def _json(world: MeshWorld, region: str, path: str) -> Any:
    code, body = world.consul(region, "GET", path)
    assert code == 200, body
    return json.loads(body)


def _denied(world: MeshWorld, region: str) -> int:
    """Calls that the sidecars of a region have denied so far."""
    total = 0
    at = world.world.address(region)
    for number in range(world.world.spec.total):
        url = f"http://{at.instance(number)}:19000/stats?filter=rbac.*intentions_"
        with urllib.request.urlopen(url, timeout=10) as answer:
            total += sum(int(n) for n in DENIED.findall(answer.read().decode()))
    return total


def _counted(world: MeshWorld, region: str, wanted: int) -> bool:
    return _denied(world, region) == wanted


def _answers(wanted: set[int], *callers: _Caller) -> bool:
    """Whether a request of each is answered so."""
    return {caller.get() for caller in callers} == wanted


def test_a_stranger_is_denied_and_counted_and_a_client_is_not(shipped: MeshWorld) -> None:
    for region in shipped.names:
        before = _denied(shipped, region)
        with _Caller(shipped, region, STRANGER) as stranger, _Caller(shipped, region, CLIENT) as client:
            assert [stranger.get() for _ in range(3)] == [403, 403, 403]
            assert client.get() == 200
            assert stranger.get("/health") == 200  # every member of the mesh may ask for health
        shipped.until(f"{region}: counted", partial(_counted, shipped, region, before + 3))


def test_it_is_the_same_through_another_regions_mesh_gateway(shipped: MeshWorld) -> None:
    before = _denied(shipped, THERE)
    with _Caller(shipped, HERE, STRANGER, to=THERE) as stranger:
        assert [stranger.get() for _ in range(4)] == [403] * 4
    shipped.until("counted over there", partial(_counted, shipped, THERE, before + 4))
    with _Caller(shipped, HERE, CLIENT, to=THERE) as client:
        assert client.get() == 200
        assert client.colour == f"region={THERE};stage=stable"


def _knock(line: _Line) -> str:
    """One request: its status, or "closed" when the other side ends the connection instead."""
    with contextlib.closing(line):
        try:
            line.request("GET", MODELS)
            return str(line.getresponse().status)
        except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
            return "closed"


def test_who_has_no_leaf_of_this_mesh_gets_no_connection(shipped: MeshWorld, tmp_path: Path) -> None:
    ca = trustme.CA()
    forged = ca.issue_cert("spiffe-less.example")
    forged.private_key_pem.write_to_path(str(tmp_path / "key"))
    forged.cert_chain_pems[0].write_to_path(str(tmp_path / "chain"))
    at = shipped.world.address(HERE)
    for certificate in (None, (tmp_path / "chain", tmp_path / "key")):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate is not None:
            context.load_cert_chain(*certificate)
        assert _knock(_Line((at.instance(0), SIDECAR), context, "")) == "closed"


def test_a_gateway_knows_no_name_but_its_own_services(shipped: MeshWorld) -> None:
    context = _context(shipped, HERE, CLIENT)
    at = (shipped.world.address(THERE).mesh_gateway, MESH_GATEWAY)
    for name in ("", "chat", f"stable.chat.default.{HERE}.internal.somewhere.consul"):
        assert _knock(_Line(at, context, name)) == "closed"


def test_a_changed_catalog_holds_everywhere_for_connections_that_are_open(
    shipped: MeshWorld, tmp_path: Path
) -> None:
    shared = ((CLIENT, "chat", "allow"), ("*", "*", "deny"))
    open_, shut = tmp_path / "open", tmp_path / "shut"
    open_.mkdir()
    shut.mkdir()
    wider = _catalog(open_, (STRANGER, "chat", "allow"), *shared)
    with contextlib.ExitStack() as stack:
        callers = {r: stack.enter_context(_Caller(shipped, r, STRANGER)) for r in shipped.names}
        across = stack.enter_context(_Caller(shipped, HERE, STRANGER, to=THERE))
        lines = [*callers.values(), across]
        assert {line.get() for line in lines} == {403}
        ports = [line.port for line in lines]
        for catalog, status in ((wider, 200), (_catalog(shut, *shared), 403)):
            _apply(shipped, catalog)
            start = time.monotonic()
            shipped.until(f"{status} everywhere", partial(_answers, {status}, *lines))
            print(f"applied -> {status} in all regions, s:", round(time.monotonic() - start, 3))
        assert [line.port for line in lines] == ports, "a connection was dropped for it"


def test_the_time_from_consul_to_the_last_sidecar(shipped: MeshWorld) -> None:
    """A plain call to Consul's API, so that no start of a command is in the figure. Told, not judged."""
    rule = {"SourceName": STRANGER, "DestinationName": "chat", "SourceType": "consul", "Action": "allow"}
    took = []
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(_Caller(shipped, r, STRANGER)) for r in shipped.names]
        for _ in range(5):
            start = time.monotonic()
            code, body = shipped.consul(THERE, "POST", "/v1/connect/intentions", json.dumps(rule).encode())
            assert code == 200, body
            shipped.until("allowed everywhere", partial(_answers, {200}, *lines))
            took.append(time.monotonic() - start)
            gone = f"/v1/connect/intentions/{json.loads(body)['ID']}"
            start = time.monotonic()
            assert shipped.consul(THERE, "DELETE", gone)[0] == 200
            shipped.until("denied everywhere", partial(_answers, {403}, *lines))
            took.append(time.monotonic() - start)
    print("intention changed -> in force in all regions, s:", [round(t, 3) for t in took])


def test_the_ingress_itself_needs_an_intention(shipped: MeshWorld, tmp_path: Path) -> None:
    _apply(shipped, _catalog(tmp_path, ("*", "*", "deny")))

    def answers(seconds: float) -> set[int]:
        return {s.status for s in shipped.load(60, seconds)}

    shipped.until("nobody gets in", lambda: answers(0.5) == {403})
    _apply(shipped, default_file())
    # So many that each of the six sidecars is asked: of 30 requests one in ten passes over some sidecar.
    shipped.until("all get in", lambda: answers(2.0) == {200})
    assert not failures(shipped.load(60, 1))


def test_the_commands(shipped: MeshWorld, tmp_path: Path) -> None:
    for region in shipped.names:  # any agent will do: reads and writes go to the primary
        listed = _intentions(shipped, "list", "--json", region=region).json["intentions"]
        assert [(i["source"], i["destination"], i["action"]) for i in listed] == [
            (CLIENT, "chat", "allow"),
            ("*", "*", "deny"),
        ]
    assert _intentions(shipped, "check", CLIENT, "chat").code == 0
    denied = _intentions(shipped, "check", STRANGER, "chat", "--json")
    assert (denied.code, denied.json["allowed"], denied.json["rule"]["source"]) == (1, False, "*")
    catalog = _catalog(tmp_path, (STRANGER, "chat", "allow"), ("*", "*", "deny"))
    where = ("--dir", str(catalog.parent))
    planned = _intentions(shipped, "plan", "--json", *where)
    assert planned.code == 0
    assert [(p["source"], p["action"]) for p in planned.json["puts"] if p["old"] is None] == [
        (STRANGER, "allow")
    ]
    assert [d["source"] for d in planned.json["deletes"]] == [CLIENT]
    assert _intentions(shipped, "plan", "--detailed-exitcode", *where).code == 2
    unsure = _intentions(shipped, "apply", *where)
    assert (unsure.code, "not confirmed" in unsure.err) == (4, True)
    assert _intentions(shipped, "plan", "--detailed-exitcode").code == 0, "something was written"
    again = _intentions(shipped, "apply", "--yes", "--json")
    assert (again.code, again.json["changes"]) == (0, 0)
