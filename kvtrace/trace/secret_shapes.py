"""Shapes of keys and tokens that many services give out, for Python's re: the rules of gitleaks
(v8.30.1, https://github.com/gitleaks/gitleaks, config/gitleaks.toml) without a name beside it.

Made by scripts/secret_rules.py; do not edit. Standard library only: the agent uses it."""

# MIT License
#
# Copyright (c) 2019 Zachary Rice
#
# Permission is hereby granted, free of charge, to any person obtaining a copy
# of this software and associated documentation files (the "Software"), to deal
# in the Software without restriction, including without limitation the rights
# to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
# copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
#
# The above copyright notice and this permission notice shall be included in all
# copies or substantial portions of the Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
# IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
# FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
# AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
# LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
# OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
# SOFTWARE.

from __future__ import annotations

SOURCE = "gitleaks v8.30.1"
# fmt: off
# ruff: noqa: E501
SHAPES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("1password-secret-key", ("a3-",), r"\bA3-[A-Z0-9]{6}-(?:(?:[A-Z0-9]{11})|(?:[A-Z0-9]{6}-[A-Z0-9]{5}))-[A-Z0-9]{5}-[A-Z0-9]{5}-[A-Z0-9]{5}\b"),
    ("1password-service-account-token", ("ops_",), r"ops_eyJ[a-zA-Z0-9+/]{250,500}={0,3}"),
    ("adobe-client-secret", ("p8e-",), r"\b(p8e-(?i:[a-z0-9]{32}))"),
    ("age-secret-key", ("age-secret-key-1",), r"AGE-SECRET-KEY-1[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}"),
    ("alibaba-access-key-id", ("ltai",), r"\b(LTAI(?i:[a-z0-9]{20}))"),
    ("anthropic-admin-api-key", ("sk-ant-admin01",), r"\b(sk-ant-admin01-[a-zA-Z0-9_\-]{93}AA)"),
    ("anthropic-api-key", ("sk-ant-api03",), r"\b(sk-ant-api03-[a-zA-Z0-9_\-]{93}AA)"),
    ("artifactory-api-key", ("akcp",), r"\bAKCp[A-Za-z0-9]{69}\b"),
    ("artifactory-reference-token", ("cmvmd",), r"\bcmVmd[A-Za-z0-9]{59}\b"),
    ("authress-service-client-access-key", ("sc_", "ext_", "scauth_", "authress_"), r"\b((?:sc|ext|scauth|authress)_(?i:[a-z0-9]{5,30}\.[a-z0-9]{4,6}\.(?-i:acc)[_-][a-z0-9-]{10,32}\.[a-z0-9+/_=-]{30,120}))"),
    ("aws-access-token", ("a3t", "akia", "asia", "abia", "acca"), r"\b((?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16})\b"),
    ("aws-amazon-bedrock-api-key-long-lived", ("absk",), r"\b(ABSK[A-Za-z0-9+/]{109,269}={0,2})"),
    ("aws-amazon-bedrock-api-key-short-lived", ("bedrock-api-key-",), r"bedrock-api-key-YmVkcm9jay5hbWF6b25hd3MuY29t"),
    ("azure-ad-client-secret", ("q~",), r"(?<![\w~.])[a-zA-Z0-9_~.]{3}\dQ~[a-zA-Z0-9_~.-]{31,34}"),
    ("clojars-api-token", ("clojars_",), r"(?i:CLOJARS_[a-z0-9]{60})"),
    ("cloudflare-origin-ca-key", ("cloudflare", "v1.0-"), r"\b(v1\.0-[a-f0-9]{24}-[a-f0-9]{146})"),
    ("databricks-api-token", ("dapi",), r"\b(dapi[a-f0-9]{32}(?:-\d)?)"),
    ("digitalocean-access-token", ("doo_v1_",), r"\b(doo_v1_[a-f0-9]{64})"),
    ("digitalocean-pat", ("dop_v1_",), r"\b(dop_v1_[a-f0-9]{64})"),
    ("digitalocean-refresh-token", ("dor_v1_",), r"(?i:\b(dor_v1_[a-f0-9]{64}))"),
    ("doppler-api-token", ("dp.pt.",), r"dp\.pt\.(?i:[a-z0-9]{43})"),
    ("duffel-api-token", ("duffel_",), r"duffel_(?:test|live)_(?i:[a-z0-9_\-=]{43})"),
    ("dynatrace-api-token", ("dt0c01.",), r"dt0c01\.(?i:[a-z0-9]{24}\.[a-z0-9]{64})"),
    ("easypost-api-token", ("ezak",), r"\bEZAK(?i:[a-z0-9]{54}\b)"),
    ("easypost-test-api-token", ("eztk",), r"\bEZTK(?i:[a-z0-9]{54}\b)"),
    ("facebook-page-access-token", ("eaam", "eaac"), r"\b(EAA[MC](?i:[a-z0-9]{100,400}))"),
    ("flutterwave-encryption-key", ("flwseck_test",), r"FLWSECK_TEST-(?i:[a-h0-9]{12})"),
    ("flutterwave-public-key", ("flwpubk_test",), r"FLWPUBK_TEST-(?i:[a-h0-9]{32}-X)"),
    ("flutterwave-secret-key", ("flwseck_test",), r"FLWSECK_TEST-(?i:[a-h0-9]{32}-X)"),
    ("flyio-access-token", ("fo1_", "fm1", "fm2_"), r"\b((?:fo1_[\w-]{43}|fm1[ar]_[a-zA-Z0-9+\/]{100,400}={0,3}|fm2_[a-zA-Z0-9+\/]{100,400}={0,3}))"),
    ("frameio-api-token", ("fio-u-",), r"fio-u-(?i:[a-z0-9\-_=]{64})"),
    ("gcp-api-key", ("aiza",), r"\b(AIza[\w-]{35})"),
    ("github-app-token", ("ghu_", "ghs_"), r"(?:ghu|ghs)_[0-9a-zA-Z]{36}"),
    ("github-fine-grained-pat", ("github_pat_",), r"github_pat_\w{82}"),
    ("github-oauth", ("gho_",), r"gho_[0-9a-zA-Z]{36}"),
    ("github-pat", ("ghp_",), r"ghp_[0-9a-zA-Z]{36}"),
    ("github-refresh-token", ("ghr_",), r"ghr_[0-9a-zA-Z]{36}"),
    ("gitlab-cicd-job-token", ("glcbt-",), r"glcbt-[0-9a-zA-Z]{1,5}_[0-9a-zA-Z_-]{20}"),
    ("gitlab-deploy-token", ("gldt-",), r"gldt-[0-9a-zA-Z_\-]{20}"),
    ("gitlab-feature-flag-client-token", ("glffct-",), r"glffct-[0-9a-zA-Z_\-]{20}"),
    ("gitlab-feed-token", ("glft-",), r"glft-[0-9a-zA-Z_\-]{20}"),
    ("gitlab-incoming-mail-token", ("glimt-",), r"glimt-[0-9a-zA-Z_\-]{25}"),
    ("gitlab-kubernetes-agent-token", ("glagent-",), r"glagent-[0-9a-zA-Z_\-]{50}"),
    ("gitlab-oauth-app-secret", ("gloas-",), r"gloas-[0-9a-zA-Z_\-]{64}"),
    ("gitlab-pat", ("glpat-",), r"glpat-[\w-]{20}"),
    ("gitlab-pat-routable", ("glpat-",), r"\bglpat-[0-9a-zA-Z_-]{27,300}\.[0-9a-z]{2}[0-9a-z]{7}\b"),
    ("gitlab-ptt", ("glptt-",), r"glptt-[0-9a-f]{40}"),
    ("gitlab-rrt", ("gr1348941",), r"GR1348941[\w-]{20}"),
    ("gitlab-runner-authentication-token", ("glrt-",), r"glrt-[0-9a-zA-Z_\-]{20}"),
    ("gitlab-runner-authentication-token-routable", ("glrt-",), r"\bglrt-t\d_[0-9a-zA-Z_\-]{27,300}\.[0-9a-z]{2}[0-9a-z]{7}\b"),
    ("gitlab-scim-token", ("glsoat-",), r"glsoat-[0-9a-zA-Z_\-]{20}"),
    ("grafana-api-key", ("eyjrijoi",), r"(?i:\b(eyJrIjoi[A-Za-z0-9]{70,400}={0,3}))"),
    ("grafana-cloud-api-token", ("glc_",), r"(?i:\b(glc_[A-Za-z0-9+/]{32,400}={0,3}))"),
    ("grafana-service-account-token", ("glsa_",), r"(?i:\b(glsa_[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}))"),
    ("harness-api-key", ("pat.", "sat."), r"(?:pat|sat)\.[a-zA-Z0-9_-]{22}\.[a-zA-Z0-9]{24}\.[a-zA-Z0-9]{20}"),
    ("hashicorp-tf-api-token", ("atlasv1",), r"(?i:[a-z0-9]{14}\.(?-i:atlasv1)\.[a-z0-9\-_=]{60,70})"),
    ("heroku-api-key-v2", ("hrku-aa",), r"\b((HRKU-AA[0-9a-zA-Z_-]{58}))"),
    ("huggingface-access-token", ("hf_",), r"\b(hf_(?i:[a-z]{34}))"),
    ("huggingface-organization-api-token", ("api_org_",), r"\b(api_org_(?i:[a-z]{34}))"),
    ("infracost-api-token", ("ico-",), r"\b(ico-[a-zA-Z0-9]{32})"),
    ("intra42-client-secret", ("intra", "s-s4t2ud-", "s-s4t2af-"), r"\b(s-s4t2(?:ud|af)-(?i:[abcdef0123456789]{64}))"),
    ("jwt", ("ey",), r"\b(ey[a-zA-Z0-9]{17,400}\.ey[a-zA-Z0-9\/\\_-]{17,400}\.(?:[a-zA-Z0-9\/\\_-]{10,400}={0,2})?)"),
    ("jwt-base64", ("zxlk",), r"\bZXlK(?:(?P<alg>aGJHY2lPaU)|(?P<apu>aGNIVWlPaU)|(?P<apv>aGNIWWlPaU)|(?P<aud>aGRXUWlPaU)|(?P<b64>aU5qUWlP)|(?P<crit>amNtbDBJanBi)|(?P<cty>amRIa2lPaU)|(?P<epk>bGNHc2lPbn)|(?P<enc>bGJtTWlPaU)|(?P<jku>cWEzVWlPaU)|(?P<jwk>cWQyc2lPb)|(?P<iss>cGMzTWlPaU)|(?P<iv>cGRpSTZJ)|(?P<kid>cmFXUWlP)|(?P<key_ops>clpYbGZiM0J6SWpwY)|(?P<kty>cmRIa2lPaUp)|(?P<nonce>dWIyNWpaU0k2)|(?P<p2c>d01tTWlP)|(?P<p2s>d01uTWlPaU)|(?P<ppt>d2NIUWlPaU)|(?P<sub>emRXSWlPaU)|(?P<svt>emRuUWlP)|(?P<tag>MFlXY2lPaU)|(?P<typ>MGVYQWlPaUp)|(?P<url>MWNtd2l)|(?P<use>MWMyVWlPaUp)|(?P<ver>MlpYSWlPaU)|(?P<version>MlpYSnphVzl1SWpv)|(?P<x>NElqb2)|(?P<x5c>NE5XTWlP)|(?P<x5t>NE5YUWlPaU)|(?P<x5ts256>NE5YUWpVekkxTmlJNkl)|(?P<x5u>NE5YVWlPaU)|(?P<zip>NmFYQWlPaU))[a-zA-Z0-9\/\\_+\-\r\n]{40,400}={0,2}"),
    ("linear-api-key", ("lin_api_",), r"lin_api_(?i:[a-z0-9]{40})"),
    ("maxmind-license-key", ("_mmk",), r"\b([A-Za-z0-9]{6}_[A-Za-z0-9]{29}_mmk)"),
    ("microsoft-teams-webhook", ("webhook.office.com", "webhookb2", "incomingwebhook"), r"https://[a-z0-9]{1,400}\.webhook\.office\.com/webhookb2/[a-z0-9]{8}-([a-z0-9]{4}-){3}[a-z0-9]{12}@[a-z0-9]{8}-([a-z0-9]{4}-){3}[a-z0-9]{12}/IncomingWebhook/[a-z0-9]{32}/[a-z0-9]{8}-([a-z0-9]{4}-){3}[a-z0-9]{12}"),
    ("notion-api-token", ("ntn_",), r"\b(ntn_[0-9]{11}[A-Za-z0-9]{32}[A-Za-z0-9]{3})"),
    ("npm-access-token", ("npm_",), r"(?i:\b(npm_[a-z0-9]{36}))"),
    ("octopus-deploy-api-key", ("api-",), r"\b(API-[A-Z0-9]{26})"),
    ("openai-api-key", ("t3blbkfj",), r"\b(sk-(?:proj|svcacct|admin)-(?:[A-Za-z0-9_-]{74}|[A-Za-z0-9_-]{58})T3BlbkFJ(?:[A-Za-z0-9_-]{74}|[A-Za-z0-9_-]{58})\b|sk-[a-zA-Z0-9]{20}T3BlbkFJ[a-zA-Z0-9]{20})"),
    ("openshift-user-token", ("sha256~",), r"\b(sha256~[\w-]{43})"),
    ("perplexity-api-key", ("pplx-",), r"\b(pplx-[a-zA-Z0-9]{48})"),
    ("planetscale-api-token", ("pscale_tkn_",), r"\b(pscale_tkn_(?i:[\w=\.-]{32,64}))"),
    ("planetscale-oauth-token", ("pscale_oauth_",), r"\b(pscale_oauth_[\w=\.-]{32,64})"),
    ("planetscale-password", ("pscale_pw_",), r"(?i:\b(pscale_pw_(?i:[\w=\.-]{32,64})))"),
    ("postman-api-token", ("pmak-",), r"\b(PMAK-(?i:[a-f0-9]{24}\-[a-f0-9]{34}))"),
    ("prefect-api-token", ("pnu_",), r"\b(pnu_[a-zA-Z0-9]{36})"),
    ("pulumi-api-token", ("pul-",), r"\b(pul-[a-f0-9]{40})"),
    ("pypi-upload-token", ("pypi-ageichlwas5vcmc",), r"pypi-AgEIcHlwaS5vcmc[\w-]{50,1000}"),
    ("readme-api-token", ("rdme_",), r"\b(rdme_[a-z0-9]{70})"),
    ("rubygems-api-token", ("rubygems_",), r"\b(rubygems_[a-f0-9]{48})"),
    ("scalingo-api-token", ("tk-us-",), r"\b(tk-us-[\w-]{48})"),
    ("sendgrid-api-token", ("sg.",), r"\b(SG\.(?i:[a-z0-9=_\-\.]{66}))"),
    ("sendinblue-api-token", ("xkeysib-",), r"\b(xkeysib-[a-f0-9]{64}\-(?i:[a-z0-9]{16}))"),
    ("sentry-org-token", ("sntrys_eyjpyxqio",), r"\bsntrys_eyJpYXQiO[a-zA-Z0-9+/]{10,200}(?:LCJyZWdpb25fdXJs|InJlZ2lvbl91cmwi|cmVnaW9uX3VybCI6)[a-zA-Z0-9+/]{10,200}={0,2}_[a-zA-Z0-9+/]{43}"),
    ("sentry-user-token", ("sntryu_",), r"\b(sntryu_[a-f0-9]{64})"),
    ("settlemint-application-access-token", ("sm_aat",), r"\b(sm_aat_[a-zA-Z0-9]{16})"),
    ("settlemint-personal-access-token", ("sm_pat",), r"\b(sm_pat_[a-zA-Z0-9]{16})"),
    ("settlemint-service-access-token", ("sm_sat",), r"\b(sm_sat_[a-zA-Z0-9]{16})"),
    ("shippo-api-token", ("shippo_",), r"\b(shippo_(?:live|test)_[a-fA-F0-9]{40})"),
    ("shopify-access-token", ("shpat_",), r"shpat_[a-fA-F0-9]{32}"),
    ("shopify-custom-access-token", ("shpca_",), r"shpca_[a-fA-F0-9]{32}"),
    ("shopify-private-app-access-token", ("shppa_",), r"shppa_[a-fA-F0-9]{32}"),
    ("shopify-shared-secret", ("shpss_",), r"shpss_[a-fA-F0-9]{32}"),
    ("slack-app-token", ("xapp",), r"(?i:xapp-\d-[A-Z0-9]{1,400}-\d{1,400}-[a-z0-9]{1,400})"),
    ("slack-bot-token", ("xoxb",), r"xoxb-[0-9]{10,13}-[0-9]{10,13}[a-zA-Z0-9-]{0,400}"),
    ("slack-config-access-token", ("xoxe.xoxb-", "xoxe.xoxp-"), r"(?i:xoxe.xox[bp]-\d-[A-Z0-9]{163,166})"),
    ("slack-config-refresh-token", ("xoxe-",), r"(?i:xoxe-\d-[A-Z0-9]{146})"),
    ("slack-legacy-bot-token", ("xoxb",), r"xoxb-[0-9]{8,14}-[a-zA-Z0-9]{18,26}"),
    ("slack-legacy-token", ("xoxo", "xoxs"), r"xox[os]-\d{1,400}-\d{1,400}-\d{1,400}-[a-fA-F\d]{1,400}"),
    ("slack-legacy-workspace-token", ("xoxa", "xoxr"), r"xox[ar]-(?:\d-)?[0-9a-zA-Z]{8,48}"),
    ("slack-user-token", ("xoxp-", "xoxe-"), r"xox[pe](?:-[0-9]{10,13}){3}-[a-zA-Z0-9-]{28,34}"),
    ("slack-webhook-url", ("hooks.slack.com",), r"(?:https?://)?hooks.slack.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{43,56}"),
    ("square-access-token", ("sq0atp-", "eaaa"), r"\b((?:EAAA|sq0atp-)[\w-]{22,60})"),
    ("stripe-access-token", ("sk_test", "sk_live", "sk_prod", "rk_test", "rk_live", "rk_prod"), r"\b((?:sk|rk)_(?:test|live|prod)_[a-zA-Z0-9]{10,99})"),
    ("twilio-api-key", ("sk",), r"SK[0-9a-fA-F]{32}"),
    ("vault-batch-token", ("hvb.",), r"\b(hvb\.[\w-]{138,300})"),
)
"""(id of the rule, words of which such a text has one in lower case, pattern)"""
