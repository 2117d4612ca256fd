"""Tests the comment on a pull request against a stand-in of the interfaces of GitHub and GitLab."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pytest_gputrain.cli.main import main


class Comments(BaseHTTPRequestHandler):
    """Has the comments of one pull request, some of other people."""

    def log_message(self, *_):
        pass

    def answer(self, value, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def handle_one(self):
        server, (path, _, query) = self.server, self.path.partition("?")
        server.asked.append((self.command, path, self.headers))
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        own = {"id": 7, "login": "github-actions[bot]"}
        if path == "/user":
            self.answer(own)
        elif path == "/graphql":
            self.answer({"data": {"viewer": {"id": own["id"]}} if "{viewer{id:databaseId}}" in body["query"] else None})
        elif self.command in server.refused:
            self.answer({"message": "Resource not accessible"}, server.refused[self.command])
        elif self.command == "GET":
            page = int(query.rpartition("page=")[2])
            author = "author" if "Private-Token" in self.headers else "user"
            of_me = range(len(server.strangers), len(server.texts))
            comments = [
                {"id": number, "body": text, author: own if number in of_me else {"id": 8}}
                for number, text in server.texts.items()
            ]
            self.answer(comments[page * 100 - 100 : page * 100])
        elif self.command == "POST":
            server.texts[len(server.texts)] = body["body"]
            self.answer({}, 201)
        else:
            server.texts[int(path.rpartition("/")[2])] = body["body"]
            self.answer({})

    do_GET = do_POST = do_PATCH = do_PUT = handle_one


@pytest.fixture
def host():
    with ThreadingHTTPServer(("127.0.0.1", 0), Comments) as server:
        # A stranger may write a comment that begins as ours do.
        server.strangers = [f"comment {number}" for number in range(129)] + ["<!-- gputrain comment: gputrain -->"]
        server.texts, server.asked, server.refused = dict(enumerate(server.strangers)), [], {}
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(params=["GitHub", "GitLab"])
def job(request, host, monkeypatch, tmp_path):
    for name in ("GITHUB_ACTIONS", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "event.json").write_text(json.dumps({"pull_request": {"number": 7}}))
    variables = {
        "GitHub": {
            "GITHUB_ACTIONS": "true",
            "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
            "GITHUB_API_URL": host.url,
            "GITHUB_GRAPHQL_URL": f"{host.url}/graphql",
            "GITHUB_REPOSITORY": "ours/models",
            "GITHUB_TOKEN": "secret",
            "GITHUB_SERVER_URL": "https://host",
            "GITHUB_RUN_ID": "55",
        },
        "GitLab": {
            "GITLAB_CI": "true",
            "CI_API_V4_URL": host.url,
            "CI_PROJECT_ID": "3",
            "CI_MERGE_REQUEST_IID": "7",
            "GPUTRAIN_GITLAB_TOKEN": "secret",
            "CI_JOB_URL": "https://host/job",
        },
    }[request.param]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.md").write_text("## gputrain: 1 regressed\n")
    return request.param


def test_a_later_run_replaces_the_comment_and_no_other(job, host, tmp_path, capsys):
    assert main(["comment", "tiny.md", "full.md", "--accept", "Run the workflow accept."]) == 0
    assert len(host.texts) == 131
    posted = host.texts[130].splitlines()
    assert posted[1] == "## gputrain: 1 regressed"
    assert "full.md: the run ended before" in host.texts[130]
    assert posted[-2:] == ["Run the workflow accept.", "[The job](https://host/ours/models/actions/runs/55)"] or (
        job == "GitLab" and posted[-1] == "[The job](https://host/job)"
    )
    (tmp_path / "tiny.md").write_text("## gputrain: 1 pass\n")
    assert main(["comment", "tiny.md", "full.md", "--accept", "Run the workflow accept."]) == 0
    assert (len(host.texts), host.texts[130].splitlines()[1]) == (131, "## gputrain: 1 pass")
    assert "Run the workflow" not in host.texts[130]
    assert main(["comment", "tiny.md", "--name=nightly"]) == 0
    assert len(host.texts) == 132
    assert [host.texts[number] for number in range(130)] == host.strangers
    assert capsys.readouterr().out.splitlines()[1:] == ["replaced comment 130", "posted a comment"]
    assert all("secret" in (headers["Authorization"] or headers["Private-Token"]) for *_, headers in host.asked)


@pytest.mark.parametrize("job", ["GitHub"], indirect=True)
def test_a_token_that_may_only_read_fails_nothing(job, host, capsys):
    host.refused = {"POST": 403}
    assert main(["comment", "tiny.md"]) == 0
    assert "the token may not comment (403" in capsys.readouterr().out


@pytest.mark.parametrize("job", ["GitLab"], indirect=True)
def test_a_summary_mentions_nobody_and_commands_nothing(job, host, tmp_path):
    told = (
        "/merge\n- of @pytest.mark and _@someone_ in ours/models#12, !3, GH-4 and &#64;someone, not gemma-7b@tiny or #fast\n"
    )
    (tmp_path / "tiny.md").write_text(told)
    assert main(["comment", "tiny.md", "/@someone.md"]) == 0
    hidden = host.texts[130].replace("\N{ZERO WIDTH SPACE}", "|")
    assert "\n\\/merge\n- of @|pytest.mark and _@|someone_ in ours/models#|12, !|3, GH-|4 and &|#|64;" in hidden
    assert "not gemma-7b@tiny or #fast" in hidden
    assert "**@|someone.md: the run ended" in hidden


@pytest.mark.parametrize("job", ["GitHub"], indirect=True)
def test_a_host_that_fails_is_named(job, host, capsys):
    host.refused = {"GET": 502}
    assert main(["comment", "tiny.md"]) == 2
    assert "/repos/ours/models/issues/7/comments?per_page=100&page=1 failed: 502" in capsys.readouterr().err


@pytest.mark.parametrize("job", ["GitHub"], indirect=True)
def test_a_long_summary_is_cut_and_keeps_how_to_accept_it(job, host, tmp_path):
    (tmp_path / "tiny.md").write_text("| a case |\n" * 20_000)
    assert main(["comment", "tiny.md", "--accept", "Accept it."]) == 0
    assert len(host.texts[130].encode()) <= 65_536
    assert "Accept it." in host.texts[130].splitlines()[-2]


@pytest.mark.parametrize("job", ["GitHub"], indirect=True)
def test_a_comment_can_be_printed_outside_of_ci_too(job, host, monkeypatch, capsys):
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert main(["comment", "tiny.md", "--accept=Accept it.", "--print"]) == 0
    assert capsys.readouterr().out == "<!-- gputrain comment: gputrain -->\n## gputrain: 1 regressed\n\n\nAccept it.\n"
    assert host.asked == []


@pytest.mark.parametrize("job", ["GitLab"], indirect=True)
def test_a_link_to_a_file_of_the_host_is_not_posted(job, host, tmp_path):
    (tmp_path / "secret").write_text("the token")
    (tmp_path / "cpu.md").symlink_to("secret")
    assert main(["comment", "cpu.md"]) == 0
    assert "the token" not in host.texts[130]


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"GITHUB_EVENT_PATH": "push.json"}, 0, "does not run for a pull request"),
        ({"GITHUB_TOKEN": ""}, 2, "GITHUB_TOKEN is not set"),
        ({"GITHUB_EVENT_PATH": "none.json"}, 2, "GITHUB_EVENT_PATH names no event"),
        ({"GITHUB_ACTIONS": ""}, 2, "no job of GitHub or GitLab"),
    ],
)
@pytest.mark.parametrize("job", ["GitHub"], indirect=True)
def test_a_job_that_cannot_comment_is_told(job, host, tmp_path, monkeypatch, capsys, changed, status, said):
    (tmp_path / "push.json").write_text("{}")
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    assert main(["comment", "tiny.md"]) == status
    told = capsys.readouterr()
    assert said in (told.err if status else told.out)
    assert not host.asked
