"""Bytes between two hosts: mutual TLS over TCP, or memory."""
