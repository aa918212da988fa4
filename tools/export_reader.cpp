// Reads an export of `goldens export`: every tensor's line of index.tsv and its bytes. g++ -std=c++17 -O2 reader.cpp
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

int main(int argc, char** argv) {
    const std::string folder = argc > 1 ? argv[1] : ".";
    std::ifstream index(folder + "/index.tsv");
    std::string line;
    if (!std::getline(index, line)) return std::fprintf(stderr, "%s/index.tsv: cannot be read\n", folder.c_str()), 1;
    while (std::getline(index, line)) {
        std::istringstream fields(line);
        std::string id, tensor, dtype, shape, count, file;
        for (auto* field : {&id, &tensor, &dtype, &shape, &count, &file}) std::getline(fields, *field, '\t');
        std::ifstream data(folder + "/" + file, std::ios::binary);
        const std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(data)), {});
        if (bytes.size() != std::stoull(count)) return std::fprintf(stderr, "%s: wrong size\n", file.c_str()), 1;
        uint64_t sum = 0xcbf29ce484222325;  // FNV-1a
        for (uint8_t byte : bytes) sum = (sum ^ byte) * 0x100000001b3;
        std::printf("%s\t%s\t%s\t%s\t%016llx\n", id.c_str(), tensor.c_str(), dtype.c_str(), shape.c_str(),
                    static_cast<unsigned long long>(sum));
    }
    return index.eof() ? 0 : 1;
}
