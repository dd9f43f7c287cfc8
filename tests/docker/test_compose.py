"""compose.yaml refers only to what there is, and starts programs with options that they know."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest
import typer
import yaml
from dockerfile import DOCKER, PROJECT, stages

from worldserve.commands.up import size_bytes, up

COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
EACH = pytest.mark.parametrize("name", SERVICES)


@EACH
def test_images_are_pinned_and_health_is_known(name):
    """A tag that moves is no version; who waits for a service must be able to know it well."""
    service = SERVICES[name]
    if "build" in service:
        build = service["build"]
        path = (DOCKER / build["context"]).resolve()
        assert (path / build["dockerfile"]).exists()
        assert build["target"] in stages()
    else:
        _, _, tag = service["image"].rpartition(":")
        assert re.search(r"\d", tag)
        assert tag != "latest"
        assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert "no-new-privileges:true" in service["security_opt"]


@EACH
def test_references_lead_somewhere(name):
    """Services, volumes, files, secrets and networks that are named exist."""
    service = SERVICES[name]
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    assert set(service["networks"]) <= set(COMPOSE["networks"])
    assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("."):
            assert (DOCKER / source).exists(), source
            assert volume.endswith(":ro")
        else:
            assert source in COMPOSE["volumes"]


def test_only_the_proxy_can_be_reached_from_elsewhere():
    """Triton's and MinIO's ports are published nowhere, those for people on loopback alone."""
    open_to_all = {
        name
        for name, service in SERVICES.items()
        for port in service.get("ports", [])
        if not str(port).startswith("127.0.0.1:")
    }
    assert open_to_all == {"proxy"}
    assert SERVICES["ctrlcache"]["networks"] == SERVICES["minio"]["networks"] == ["inside"]
    assert COMPOSE["networks"]["inside"]["internal"]


def test_no_secret_is_written_here():
    """Passwords come from the environment, and compose refuses to start without them."""
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|ACCESS_KEY|ROOT_USER", name):
                assert re.fullmatch(r"\$\{\w+:\?.*\}", value), name
    for secret in COMPOSE["secrets"].values():
        assert secret["file"].startswith("./secrets/")
    ignored = (PROJECT / ".gitignore").read_text().splitlines()
    assert {"/docker/secrets/", "/docker/.env"} <= set(ignored)


def test_the_server_is_started_with_options_it_knows():
    """The command line is parsed by the program itself."""
    program = typer.Typer(add_completion=False)
    program.command()(up)
    command = typer.main.get_command(program)
    command.make_context("up", list(SERVICES["ctrlcache"]["command"]))
    with pytest.raises(Exception, match="No such option"):
        command.make_context("up", ["--no-such-option"])


def test_shared_memory_holds_what_is_put_there():
    """The hot tier, and at least a gigabyte for the warm tier's index and Triton's buffers."""
    service = SERVICES["ctrlcache"]
    [hot] = [part.split("=")[1] for part in service["command"] if part.startswith("--hot-bytes")]
    shm = size_bytes(service["shm_size"].replace("gb", "GiB"))
    assert shm >= size_bytes(hot) + (1 << 30)
    grace_s = float(service["stop_grace_period"].rstrip("s"))
    assert grace_s >= 10, "the server needs up to ten seconds to write what it must not lose"


def test_every_address_in_the_configurations_is_a_service():
    """Prometheus, Grafana and the proxy ask for names that compose gives, at ports that listen."""
    listens = {
        "ctrlcache": {int(port) for port in stages()["triton"].last("EXPOSE").split()},
        "minio": {9000},
        "prometheus": {9090},
    }
    prometheus = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    asked = [
        target
        for job in prometheus["scrape_configs"]
        for part in job["static_configs"]
        for target in part["targets"]
    ]
    [source] = yaml.safe_load(
        (DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text()
    )["datasources"]
    asked.append(urlsplit(source["url"]).netloc)
    nginx = (DOCKER / "nginx" / "nginx.conf").read_text()
    asked += re.findall(r"set \$server_\w+ (\S+);", nginx)
    asked += [part.split("=")[1] for part in SERVICES["ctrlcache"]["command"] if "endpoint" in part]
    assert len(asked) == 8
    for address in asked:
        host, port = address.split(":")
        assert int(port) in listens[host], address
    published = {int(port.split(":")[1]) for port in SERVICES["proxy"]["ports"]}
    assert published == {int(port) for port in re.findall(r"listen (\d+)", nginx)}


def test_grafana_finds_its_dashboards_where_they_are_put():
    """The provisioned path is where the folder is mounted."""
    provider = yaml.safe_load(
        (DOCKER / "grafana/provisioning/dashboards/ctrlcache.yml").read_text()
    )
    [place] = [each["options"]["path"] for each in provider["providers"]]
    mounted = [volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"]]
    assert ["./grafana/dashboards", place] in mounted
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DOCKER / "grafana" / "dashboards" / home.removeprefix(place + "/")).exists()


def test_the_gpu_file_only_adds_to_what_there_is():
    """It overrides a service that exists."""
    extra = yaml.safe_load((DOCKER / "compose.gpu.yaml").read_text())
    assert set(extra["services"]) <= set(SERVICES)
